"""lin-attn env: versions, devices, and which backends are usable here and why one is not."""

import os
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from models.cli.arguments import ArgumentParser

PACKAGES = ("lin-attn", "torch", "lightning", "torchmetrics", "datasets", "einops", "jsonargparse", "numpy", "pyarrow")


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn env`."""
    ArgumentParser(prog="lin-attn env", description=__doc__).parse_args(arguments)
    import torch

    from lin_attn.data.cache import default_cache_dir
    from lin_attn.kernels import cpu
    from lin_attn.ops.backends import usable_backends
    from models.cli.configs import config_folder
    from models.hardware import default_precision, has_bf16_products

    rows = [("Python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, _version(name)) for name in PACKAGES]
    rows.append(("CPU", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"))
    rows.append(("bfloat16 products", "yes" if has_bf16_products() else "no"))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            rows.append((f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    else:
        rows.append(("cuda", "not available to this torch"))
    rows.append(("mps", "available" if torch.backends.mps.is_available() else "not available to this torch"))
    rows.append(("default precision", default_precision()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say of the kernel stands in the table
        backends = usable_backends()
    rows += [(f"backend {name}", reason or "usable") for name, reason in backends.items()]
    if backends["cpu"] is None:
        rows.append(("CPU kernel", cpu.describe()))
    rows.append(("backend in use", os.environ.get("LIN_ATTN_BACKEND") or "auto: the fastest that can"))
    rows.append(("configurations", str(config_folder())))
    rows.append(("corpus cache", default_cache_dir()))
    sys.stdout.writelines(f"{name:18} {value}\n" for name, value in rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
