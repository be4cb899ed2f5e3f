"""The process that measures one cell. It is fresh, so its memory is the cell's; it waits to be told when to measure."""

from __future__ import annotations

import contextlib
import signal
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.bench_cell import DECODE, PREFILL, TRAIN, Cell
from experiments.measure import PeakMemory
from experiments.timing import Load, Reading, calls_needed, now, peak_flops, read
from kernels import backend

# Tokens of the step that loads libraries, before memory is looked at.
_SHORT = 16
# Tokens of one reading of decoding, at most, and at most a sixteenth of the context, which they lengthen.
_DECODED = 32


class Session:
    """A cell's model and data on its device."""

    def __init__(self, cell: Cell) -> None:
        self.cell, options = cell, cell.settings
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        backend.use(options.backend)
        self.device = torch.device(cell.device)
        self.model = cell.model()
        self.tokens = torch.randint(options.vocabulary, (options.batch_size, options.length), device=self.device)
        self.calls: dict[str, int] = {}
        self._load, self._peak = Load(), 0.0

    def prepare(self) -> int | None:
        """Peak memory of the first training step, in bytes; afterwards everything is warm."""
        memory = self._memory()
        self.calls[TRAIN] = calls_needed(self._train, self.device)
        if PREFILL in self.cell.flops:
            self.model.eval()
            self.calls[PREFILL] = calls_needed(self._prefill, self.device)
        return memory

    def round(self) -> dict[str, Reading]:
        """One reading of everything that this model can do."""
        self._peak = max(self._peak, peak_flops(self.device, self.cell.settings.precision))
        self.model.train()
        readings = {TRAIN: self._read(TRAIN, self._train)}
        self.model.zero_grad()
        self.model.eval()
        if PREFILL in self.cell.flops:
            readings[PREFILL] = self._read(PREFILL, self._prefill)
        if DECODE in self.cell.flops:
            # The first token behind a prompt makes the caches grow.
            self._decode()
            self.calls[DECODE] = max(1, min(_DECODED, self.cell.settings.length // 16))
            readings[DECODE] = self._read(DECODE, self._decode)
        self.state = None
        return readings

    def peak(self) -> float:
        """FLOPs in a second of the fastest matrix product so far."""
        return self._peak

    def shared_cores(self) -> float:
        """Cores that others kept busy while times were read."""
        return self._load.cores()

    def _read(self, what: str, call: Any) -> Reading:
        self._load.start()
        reading = read(call, self.device, self.calls[what])
        self._load.stop()
        return reading

    def _memory(self) -> int | None:
        """Bytes of weights, gradients, activations and workspace; None where the system does not tell."""
        self._train(self.tokens[:, :_SHORT])
        self.model.zero_grad()
        peak = PeakMemory(self.device)
        before = peak.bytes()
        self._train()
        now(self.device)
        after = peak.bytes()
        if self.device.type == "cuda" or before is None or after is None:
            return after
        # The process had Python and libraries in memory already, and the weights.
        return after - before + sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.settings.precision == "bf16-mixed")

    def _train(self, tokens: Tensor | None = None) -> None:
        """Forward and backward. Without the optimiser: what it takes depends on the parameters, not on the length."""
        tokens = self.tokens if tokens is None else tokens
        self.model.zero_grad()
        # Random tokens are their own labels: only the shapes matter.
        with self._autocast():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()

    @torch.no_grad()
    def _prefill(self) -> None:
        with self._autocast():
            _, self.state = self.model.prefill(self.tokens)

    @torch.no_grad()
    def _decode(self) -> None:
        with self._autocast():
            _, self.state = self.model.extend(self.tokens[:, :1], self.state)


class Failed(Exception):
    """A cell that did not come through; `traceback` is that of its process."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.traceback = traceback


class Worker:
    """The process of one cell, seen from the one that tells it what to do."""

    def __init__(self, cell: Cell) -> None:
        # Spawned, not forked: nothing of this process' memory is in it.
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(cell, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str) -> Any:
        """What a method of its session returns.

        Raises:
            Failed: it raised, or the process died.
        """
        try:
            self._connection.send(name)
            good, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            ending = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            hint = ", perhaps out of memory" if code == -signal.SIGKILL else ""
            raise Failed(f"its process ended with {ending}{hint}") from None
        if not good:
            raise Failed(*answer)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(cell: Cell, connection: Connection) -> None:
    """Answer until the other side is gone."""
    # Ctrl-C reaches the whole group; who asked ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Out of memory, the system should end this process and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    session: Session | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name = connection.recv()
            try:
                session = session or Session(cell)
                answer = True, getattr(session, name)()
            except Exception as error:
                answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc())
            connection.send(answer)
