"""The figures of a run's speed are those that a clock and torch's counter of operations give."""

import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from models import CausalLM
from models.config import NetworkConfig
from models.throughput import FetchTimer, Throughput, peak_memory, training_flops
from tests.models.test_training_options import NETWORK, OPTIMIZER, batches
from tests.scaling.test_cost import counted

WIDE = {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 2}


def test_the_operations_of_a_step_are_three_times_those_counted_in_forward():
    config = NetworkConfig(**WIDE, n_kv_heads=1, ffn="swiglu")
    network = CausalLM(network=WIDE | {"n_kv_heads": 1, "ffn": "swiglu"}).network
    tokens = torch.randint(40, (3, 200))
    with torch.no_grad():
        forward = counted(lambda: network.head(network(tokens)[0]))
    assert training_flops(config, 3, 200) == 3 * forward


def test_operations_grow_with_the_length_for_linear_and_with_its_square_for_softmax():
    linear, softmax = NetworkConfig(**WIDE), NetworkConfig(**WIDE, attention="softmax")
    assert training_flops(linear, 1, 1 << 16) == 2 * training_flops(linear, 1, 1 << 15)
    assert training_flops(softmax, 1, 1 << 16) > 3.9 * training_flops(softmax, 1, 1 << 15)
    # Where attention is next to nothing, both are the 6 operations a weight and token of Kaplan et al. 2020.
    weights = sum(p.numel() for p in CausalLM(network=WIDE).parameters() if p.dim() > 1)
    assert training_flops(softmax, 1, 1) == pytest.approx(6 * weights, rel=0.02)


class Slow(Callback):
    """A checkpoint that takes long, and the figures that were logged."""

    def __init__(self, save):
        self.save, self.seen = save, []

    def on_train_batch_end(self, trainer, *_):
        time.sleep(self.save)
        self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def figures(tmp_path, wait=0.0, save=0.0, **options):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            time.sleep(wait)
            return batches(1)[0]

    slow = Slow(save)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=-1,
        max_epochs=1, enable_checkpointing=False, callbacks=[Throughput(), slow], profiler=FetchTimer(),
        default_root_dir=tmp_path, log_every_n_steps=2, precision="32-true", **options,
    )  # fmt: skip
    trainer.fit(CausalLM(network=NETWORK, optimizer=OPTIMIZER), DataLoader(Data(), batch_size=None))
    return slow.seen[-1]


def test_the_share_of_waiting_for_data_is_that_of_a_loader_that_sleeps(tmp_path):
    assert figures(tmp_path)["train/data_wait"] < 0.5
    slow = figures(tmp_path, wait=0.2)
    assert 0.6 < slow["train/data_wait"] < 1
    assert slow["train/tokens_per_second"] < 48 / 0.2


def test_time_in_checkpoints_is_no_time_of_training(tmp_path):
    assert figures(tmp_path, save=0.3, accumulate_grad_batches=2)["train/tokens_per_second"] > 48 / 0.3


def test_utilisation_is_below_one_and_follows_the_tokens_a_second(tmp_path):
    seen = figures(tmp_path)
    assert 0 < seen["train/mfu"] < 1
    assert seen["train/peak_memory_gb"] > 0.05
    ceiling = training_flops(NetworkConfig(**NETWORK), 4, 12) / 48 * seen["train/tokens_per_second"] / seen["train/mfu"]
    assert 1e8 < ceiling < 1e15


def test_peak_memory_sees_what_was_held_and_let_go():
    before = peak_memory(torch.device("cpu"))
    size = before + (200 << 20)  # beyond the highest so far
    held = torch.ones(size, dtype=torch.uint8)
    del held
    assert peak_memory(torch.device("cpu")) > before + (100 << 20)


def test_softmax_is_counted_by_the_half_of_all_pairs_that_is_visible():
    config = NetworkConfig(**WIDE, attention="softmax")
    network = CausalLM(network=WIDE | {"attention": "softmax"}).network
    tokens = torch.randint(40, (1, 256))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.head(network(tokens)[0])
    pairs = 4 * config.n_layers * config.d_model
    visible = counter.get_total_flops() - pairs * 256 * 256 + pairs * 256 * 257 // 2
    assert training_flops(config, 1, 256) == 3 * visible
