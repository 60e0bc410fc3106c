"""Finding the ready configurations, in a clone or in an installed package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def config_folder() -> Path:
    """The folder `configs`: inside the installed package, or beside the packages in a clone."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def find_config(name: str) -> Path:
    """A configuration file by its path, or by its path in the ready ones, with or without `configs/` and `.yaml`.

    Raises:
        ValueError: if there is neither; it lists the ready ones.
    """
    path = Path(name)
    if path.is_file():
        return path
    relative = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not relative.is_absolute():
        for candidate in (config_folder() / relative, config_folder() / f"{relative}.yaml"):
            if candidate.is_file():
                return candidate
    ready = sorted(p.relative_to(config_folder()).as_posix() for p in config_folder().rglob("*.yaml"))
    raise ValueError(f"there is no configuration {name}; wanted a file, or of {config_folder()}: {', '.join(ready)}")
