"""Models that are compiled in one thread while another compiles or runs others."""

import threading

import torch
from graph_backends import TorchParts
from torch import nn


def model(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()


def in_threads(*functions):
    """Run functions side by side, and raise what one of them raises."""
    errors = []

    def guarded(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_a_call_while_another_thread_compiles(fresh_compiler):
    one, x, stop = model(8), torch.randn(3, 8), threading.Event()
    compiled = TorchParts().compiled(one)
    with torch.no_grad():
        expected = compiled(x)

    @torch.no_grad()
    def call():
        while not stop.is_set():
            assert torch.equal(compiled(x), expected)

    @torch.no_grad()
    def compile_others():
        try:
            for width in range(9, 15):
                other, y = model(width), torch.randn(3, width)
                torch.testing.assert_close(TorchParts().compiled(other)(y), other(y))
        finally:
            stop.set()

    in_threads(call, compile_others)


def test_threads_that_compile_at_once(fresh_compiler):
    @torch.no_grad()
    def run(width):
        own, x = model(width), torch.randn(3, width)
        compiled = TorchParts().compiled(own)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), own(x))

    in_threads(*[lambda width=width: run(width) for width in (8, 9, 10, 8)])
