"""Train a small mixture-of-experts language model; every step is one captured graph.

    python graphs/train_loop.py --ranks 2,4 --steps 200
    python graphs/train_loop.py --ranks 2 --payload mxfp8

The text is real English (`pydoc_data.topics`, which every Python carries), read as bytes. The model has two MoE layers
with eight experts each, spread over the ranks; both layers share one arena. Read these three first:

    EpbufExchange.__call__   dispatch -> this rank's experts -> combine: all that a layer knows of epbuf
    Trainer.training_step    forward, backward and optimiser: the function that is captured
    train                    capture once, then call with new batches; a validation graph between the steps

The same model then trains on one rank in plain torch. Both runs must tell the same story, or the exit status is 1.
On CPU each rank is a process and a replay re-executes the captured function; on a GPU it launches a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import host_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import epbuf

Batch = tuple[Tensor, Tensor]
Experts = Callable[[Tensor, Tensor], Tensor]  # (rows [C, H], offs [L]) -> [C, H]
Exchange = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]  # (x [T, H], topk_idx, topk_weights, experts) -> [T, H]


@dataclass(frozen=True)
class Sizes:
    """Everything that fixes the model and the order of its batches."""

    num_layers: int = 2
    num_experts: int = 8
    num_topk: int = 2
    hidden: int = 64
    expert_hidden: int = 128
    num_heads: int = 4
    sequence_length: int = 64
    num_sequences: int = 16  # of the global batch, whatever the number of ranks
    seed: int = 1
    room: float = 0.85  # of all rows, that one rank can receive

    @property
    def num_tokens(self) -> int:
        """Tokens of the global batch."""
        return self.num_sequences * self.sequence_length


PAYLOADS = ("same", "mxfp8", "fp8_block128")
QUANTISED_TOLERANCE = 0.01  # an element loses up to one part in 16, the loss of a batch much less


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    ranks: tuple[int, ...] = (2, 4)
    num_steps: int = 200
    validate_every: int = 50
    device_type: str = "cpu"
    out: Path = Path("out")
    sizes: Sizes = Sizes()
    payload: str = "same"  # of rows, and of the gradients that combine sends back

    @property
    def row_dtype(self) -> torch.dtype:
        """Return what experts compute in: `torch._grouped_mm` on CUDA takes bfloat16."""
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32

    @property
    def tolerance(self) -> float:
        """Return how far the first losses may be from plain torch, relatively."""
        if self.payload != "same":
            return QUANTISED_TOLERANCE
        return 1e-5 if self.row_dtype == torch.float32 else 1e-3


def load_text() -> tuple[Tensor, Tensor]:
    """Return the training and the validation text as bytes: the first nine tenths and the rest."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def global_batch(data: Tensor, sizes: Sizes, index: int) -> Batch:
    """Draw batch number `index`: the same one for every number of ranks.

    Shapes: tokens and targets [num_sequences, sequence_length] int64.
    """
    generator = torch.Generator().manual_seed(1_000_003 * sizes.seed + index)
    starts = torch.randint(len(data) - sizes.sequence_length - 1, (sizes.num_sequences, 1), generator=generator)
    positions = starts + torch.arange(sizes.sequence_length)
    return data[positions].long(), data[positions + 1].long()


def share_of(batch: Batch, rank: int, num_ranks: int, device: torch.device) -> Batch:
    """Return this rank's sequences of a global batch."""
    tokens, targets = (part.chunk(num_ranks)[rank].to(device) for part in batch)
    return tokens, targets


class EpbufExchange:
    """Send each row to the ranks of its experts and bring the results back.

    Args:
        overflow: [] f32; becomes 1 when any rank was sent more rows than it has room for.
    """

    def __init__(self, arena: epbuf.Arena, frame: int, overflow: Tensor) -> None:
        self.arena = arena
        self.frame = frame
        self.overflow = overflow

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
        with self.arena.acquire(self.frame) as lease:
            recv = epbuf.dispatch(lease, x, topk_idx, topk_weights)
            self.overflow.copy_(torch.maximum(self.overflow, recv.overflow[0]))
            return epbuf.combine(lease, experts(recv.dequantize(), recv.offs), topk_weights=recv.topk_weights)


class PlainExchange:
    """Do the same on one rank that owns all experts, by sorting."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
        num_tokens, num_topk = topk_idx.shape
        order = topk_idx.flatten().argsort(stable=True)
        counts = topk_idx.flatten().bincount(minlength=self.num_experts)
        rows = experts(x[order // num_topk], counts.cumsum(0).int())
        rows = rows[order.argsort()].view(num_tokens, num_topk, -1)
        return (rows * topk_weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        num_sequences, length, hidden = x.shape
        qkv = self.qkv(x).view(num_sequences, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(num_sequences, length, hidden))


class MoeLayer(nn.Module):
    """A router, and those of its experts that live on this rank.

    Every rank draws all experts and keeps its own, so that all numbers of ranks start from the same weights.
    """

    def __init__(self, sizes: Sizes, local: slice, exchange: Exchange, row_dtype: torch.dtype) -> None:
        super().__init__()
        self.num_topk = sizes.num_topk
        self.exchange = exchange
        self.row_dtype = row_dtype
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        up = torch.randn(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        down = torch.randn(sizes.num_experts, sizes.expert_hidden, sizes.hidden)
        self.up = nn.Parameter(up[local].clone() / sizes.hidden**0.5)
        self.down = nn.Parameter(down[local].clone() / (2 * sizes.num_layers * sizes.expert_hidden) ** 0.5)

    def experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        """Run each zone of `rows` through its expert; rows past `offs[-1]` hold garbage and stay garbage.

        Shapes: rows [C, H], offs [L] int32 (ends of the zones), result [C, H].
        """
        hidden = torch._grouped_mm(rows, self.up.to(rows.dtype), offs=offs)
        return torch._grouped_mm(F.silu(hidden), self.down.to(rows.dtype), offs=offs)

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        scores, topk_idx = (self.router(x) + steer).topk(self.num_topk)
        return self.exchange(x.to(self.row_dtype), topk_idx, scores.softmax(-1), self.experts).to(x.dtype)


class Block(nn.Module):
    """Attention, then experts, each on the residual stream."""

    def __init__(self, sizes: Sizes, moe: MoeLayer) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.norm_moe = nn.LayerNorm(sizes.hidden)
        self.moe = moe

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.moe(self.norm_moe(x).flatten(0, 1), steer).view_as(x)


class LanguageModel(nn.Module):
    """Predict the next byte.

    Buffers:
        steer: [num_experts] f32, added to every router's scores; zero, except to force an overflow.
    """

    steer: Tensor

    def __init__(self, sizes: Sizes, local: slice, exchanges: Iterable[Exchange], row_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(sizes.seed)
        self.num_tokens = sizes.num_tokens
        self.embed = nn.Embedding(256, sizes.hidden)
        self.position = nn.Parameter(torch.randn(sizes.sequence_length, sizes.hidden))
        self.blocks = nn.ModuleList(Block(sizes, MoeLayer(sizes, local, each, row_dtype)) for each in exchanges)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, 256, bias=False)
        self.register_buffer("steer", torch.zeros(sizes.num_experts))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's part of the loss: the sum over its tokens, divided by the tokens of the global batch."""
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.steer)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / self.num_tokens

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds: all but the experts."""
        return [p for name, p in self.named_parameters() if not name.endswith((".moe.up", ".moe.down"))]


class Trainer:
    """A model, its optimiser, and the two functions that get captured.

    Args:
        overflow: [] f32, shared with the exchanges. As the optimiser's `found_inf` it makes an update that saw an
            overflow do nothing.
    """

    def __init__(self, model: LanguageModel, overflow: Tensor) -> None:
        self.model = model
        self.overflow = overflow
        on_gpu = overflow.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True, capturable=on_gpu)
        self.optimizer.found_inf = overflow

    def training_step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Make one update and return the loss of the global batch."""
        self.overflow.zero_()
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        total = all_reduce_dense(self.model, loss.detach())
        self.optimizer.step()
        return total

    def validation_step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the global batch; no gradients."""
        self.overflow.zero_()
        with torch.no_grad():
            return sum_over_ranks(self.model(tokens, targets))

    def state(self) -> list[Tensor]:
        """Copy everything that an update changes."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *states)]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add a tensor up in place; in the plain run there is nobody to add."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def all_reduce_dense(model: LanguageModel, loss: Tensor) -> Tensor:
    """Add up the dense gradients and the loss over the ranks, as one flat tensor; return the summed loss.

    An expert's gradient needs no exchange: its rows came from all ranks.
    """
    grads = [p.grad for p in model.dense_parameters() if p.grad is not None]
    flat = sum_over_ranks(torch.cat([*(grad.flatten() for grad in grads), loss.reshape(1)]))
    for grad, summed in zip(grads, flat[:-1].split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
    return flat[-1]


@dataclass
class Run:
    """What one training run has to say."""

    name: str
    num_tokens: int
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    validation: list[tuple[int, float]] = field(default_factory=list)
    forced_flags: list[bool] = field(default_factory=list)  # by rank, of the step with the forced overflow
    update_skipped: list[bool] = field(default_factory=list)  # by rank, likewise
    num_other_overflows: int = 0
    window_allocations: int = 0
    addresses_unchanged: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens * len(self.losses) / self.seconds


def make_plan(options: Options, num_ranks: int) -> epbuf.Plan:
    """Plan one arena for all layers.

    No step of this model needs as much room as a rank has, unless all rows go to one rank.
    """
    sizes = options.sizes
    config = epbuf.EpConfig(
        num_ranks=num_ranks,
        num_experts=sizes.num_experts,
        num_topk=sizes.num_topk,
        hidden=sizes.hidden,
        max_tokens_per_rank=sizes.num_tokens // num_ranks,
        token_dtype="bf16" if options.row_dtype == torch.bfloat16 else "fp32",
        capacity_factor=sizes.room * num_ranks,
        dispatch_payload=options.payload,
        combine_grad_payload=options.payload,
    )
    return epbuf.Plan.build(config, schedule=epbuf.Schedule.sequential(num_layers=sizes.num_layers))


def make_trainer(arena: epbuf.Arena, options: Options, device: torch.device) -> Trainer:
    """Build this rank's part of the model; each layer has its own frame of the one arena."""
    sizes, overflow = options.sizes, torch.zeros((), device=device)
    frames = [arena.plan.schedule.frame(layer, microbatch=0) for layer in range(sizes.num_layers)]
    exchanges = [EpbufExchange(arena, frame, overflow) for frame in frames]
    num_local = sizes.num_experts // dist.get_world_size()
    local = slice(dist.get_rank() * num_local, (dist.get_rank() + 1) * num_local)
    return Trainer(LanguageModel(sizes, local, exchanges, options.row_dtype).to(device), overflow)


def train(arena: epbuf.Arena, options: Options, device: torch.device) -> Run:
    """Train on this rank's share of every batch. All ranks call this together."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    run = Run(f"{num_ranks} ranks, epbuf", options.sizes.num_tokens)
    trainer = make_trainer(arena, options, device)
    batches, check = my_batches(options, rank, num_ranks, device)

    restore = (trainer.model, trainer.optimizer)
    step = epbuf.CapturedStep.capture(arena, trainer.training_step, batches[0], restore=restore)
    validate = epbuf.CapturedStep.capture(arena, trainer.validation_step, check)

    losses, num_overflows = torch.zeros(options.num_steps, device=device), torch.zeros((), device=device)
    addresses, num_allocations = region_addresses(arena), arena.window_allocations
    start = time.perf_counter()
    for index in progress(options.num_steps, run.name, shown=rank == 0):
        if index == options.num_steps // 2:
            force_overflow(run, trainer, step, batches[index])
        losses[index] = step(*batches[index])
        num_overflows += trainer.overflow
        if (index + 1) % options.validate_every == 0:
            run.validation.append((index + 1, validate(*check).item()))
    run.losses, run.num_other_overflows = losses.tolist(), int(num_overflows)
    run.seconds = time.perf_counter() - start
    run.window_allocations = arena.window_allocations - num_allocations
    run.addresses_unchanged = region_addresses(arena) == addresses
    validate.close()
    step.close()
    return run


def force_overflow(run: Run, trainer: Trainer, step: epbuf.CapturedStep, batch: Batch) -> None:
    """Replay the step with every token steered to rank 0, more rows than it has room for; then undo the steering.

    The caller replays the same batch again, and training goes on as if nothing had happened.
    """
    num_ranks, steer = dist.get_world_size(), trainer.model.steer
    before = trainer.state()
    steer[: len(steer) // num_ranks] = 1e4
    step(*batch)
    steer.zero_()
    skipped = all(torch.equal(old, new) for old, new in zip(before, trainer.state(), strict=True))
    seen: list[tuple[bool, bool]] = [(False, False)] * num_ranks
    dist.all_gather_object(seen, (bool(trainer.overflow), skipped))
    run.forced_flags, run.update_skipped = [flag for flag, _ in seen], [skipped for _, skipped in seen]


def region_addresses(arena: epbuf.Arena) -> list[int]:
    """Return the address of every region of every frame."""
    addresses = []
    for frame in range(arena.plan.schedule.num_frames):
        names = [r.name for r in arena.plan.regions if r.lifetime == "frame" and r.index == frame]
        with arena.acquire(frame) as lease:
            addresses += [getattr(lease, name).data_ptr() for name in names]
    return addresses


def my_batches(options: Options, rank: int, num_ranks: int, device: torch.device) -> tuple[list[Batch], Batch]:
    """Return this rank's share of every training batch and of the one validation batch."""
    training, held_out = load_text()
    share = partial(share_of, rank=rank, num_ranks=num_ranks, device=device)
    batches = [share(global_batch(training, options.sizes, index)) for index in range(options.num_steps)]
    return batches, share(global_batch(held_out, options.sizes, 0))


def run_rank(device: torch.device, options: Options) -> Run:
    """Be one rank: open the arena, train."""
    with epbuf.Arena.open(make_plan(options, dist.get_world_size()), dist.group.WORLD, device=device) as arena:
        return train(arena, options, device)


def train_on_ranks(num_ranks: int, options: Options) -> Run:
    """Start the ranks, wait for them, and return what rank 0 found."""
    backend = "cpu:gloo,cuda:nccl" if options.device_type == "cuda" else "gloo"  # what adds gradients is captured, too
    return host_ranks.run_on_ranks(run_rank, num_ranks, options.device_type, options, backend=backend)[0]


def train_plainly(options: Options) -> Run:
    """Train on whole batches on one rank: eagerly, without epbuf, on one thread as every rank does."""
    torch.set_num_threads(1)
    sizes, device = options.sizes, torch.device(options.device_type)
    run = Run("1 rank, plain torch", sizes.num_tokens)
    exchanges = [PlainExchange(sizes.num_experts)] * sizes.num_layers
    model = LanguageModel(sizes, slice(sizes.num_experts), exchanges, options.row_dtype).to(device)
    trainer = Trainer(model, overflow=torch.zeros((), device=device))
    batches, check = my_batches(options, 0, 1, device)
    start = time.perf_counter()
    for index in progress(options.num_steps, run.name):
        run.losses.append(trainer.training_step(*batches[index]).item())
        if (index + 1) % options.validate_every == 0:
            run.validation.append((index + 1, trainer.validation_step(*check).item()))
    run.seconds = time.perf_counter() - start
    return run


def checks(run: Run, plain: Run, tolerance: float) -> list[tuple[str, bool, str]]:
    """Judge a run: (claim, does it hold, what was found)."""
    early = max(relative(a, b) for a, b in zip(run.losses[:20], plain.losses[:20], strict=True))
    last = relative(run.losses[-1], plain.losses[-1])
    check = max(relative(a, b) for (_, a), (_, b) in zip(run.validation, plain.validation, strict=True))
    fall = 1 - run.losses[-1] / run.losses[0]
    return [
        ("loss falls by a third", fall >= 1 / 3, f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}"),
        (f"first 20 losses as in plain torch, to {tolerance:g}", early <= tolerance, f"{early:.1e}"),
        ("last loss as in plain torch, to 1 %", last <= 0.01, f"{last:.1e}"),
        (
            "validation losses as in plain torch, to 1 %",
            check <= 0.01,
            f"{run.validation[-1][1]:.3f} at the end, {check:.1e}",
        ),
        ("forced overflow is flagged on every rank", all(run.forced_flags), str(run.forced_flags)),
        ("its update is skipped on every rank", all(run.update_skipped), str(run.update_skipped)),
        ("no other step overflows", run.num_other_overflows == 0, str(run.num_other_overflows)),
        ("no window allocation during the replays", run.window_allocations == 0, str(run.window_allocations)),
        ("addresses unchanged", run.addresses_unchanged, "yes" if run.addresses_unchanged else "no"),
    ]


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def print_run(run: Run, results: Sequence[tuple[str, bool, str]]) -> None:
    table = Table("claim", "found", "", title=f"{run.name}: {run.tokens_per_second:,.0f} tokens/s")
    for claim, holds, found in results:
        table.add_row(claim, found, "ok" if holds else "FAILED")
    Console().print(table)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the loss curves as a picture."""
    from matplotlib.figure import Figure  # here, so that the ranks need not load it

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for width, run in zip(range(2 * len(runs) - 1, 0, -2), runs, strict=True):  # the curves lie on each other
        axes.plot(run.losses, label=run.name, linewidth=width)
        axes.plot(*zip(*run.validation, strict=True), "o", label=f"{run.name}, validation", markersize=2 * width + 2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level MoE language model")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def progress(num_steps: int, name: str, shown: bool = True) -> Iterable[int]:
    return track(range(num_steps), description=name, disable=not shown)


def ranks_in(text: str) -> tuple[int, ...]:
    """Read numbers of ranks. More than 4 would leave rank 0 too few experts to force an overflow with."""
    ranks = tuple(int(word) for word in text.split(","))
    if not set(ranks) <= {2, 4}:
        raise argparse.ArgumentTypeError(f"found {text}; the demo trains on 2 and on 4 ranks")
    return ranks


def sizes_for(payload: str) -> Sizes:
    """Return the model for a payload: blocks of 128 need rows of 128, with which routing is less balanced."""
    return Sizes(hidden=128, seed=5, room=0.95) if payload == "fp8_block128" else Sizes()


def parse(argv: Sequence[str] | None) -> Options:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=ranks_in, default=default.ranks, help="2, 4 or 2,4: one run each")
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--payload", choices=PAYLOADS, default=default.payload, help="format in which rows travel")
    parser.add_argument("--out", type=Path, default=default.out, help="folder for the loss curve")
    arguments = host_ranks.parse(parser, argv)
    sizes, every = sizes_for(arguments.payload), max(1, arguments.steps // 6)
    return Options(arguments.ranks, arguments.steps, every, arguments.device, arguments.out, sizes, arguments.payload)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if everything held that it claims."""
    options = parse(argv)
    plain = train_plainly(options)
    runs = [train_on_ranks(num_ranks, options) for num_ranks in options.ranks]
    print(make_plan(options, options.ranks[0]))
    failed = 0
    for run in runs:
        results = checks(run, plain, options.tolerance)
        failed += sum(not holds for _, holds, _ in results)
        print_run(run, results)
    picture = options.out / "loss.png"
    draw([plain, *runs], picture)
    print(f"plain torch on 1 rank: {plain.tokens_per_second:,.0f} tokens/s; loss curves: {picture}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
