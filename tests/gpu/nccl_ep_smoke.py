#!/usr/bin/env python3
"""Try engine="nccl_ep" stage by stage, so that a failure says where: each prints one line before the next begins.

    torchrun --nproc-per-node 4 tests/gpu/nccl_ep_smoke.py [--tokens 64] [--hidden 512] [--experts 32] [--topk 4]

Ranks may share a GPU (CUDA MPS, NCCL_MULTI_RANK_GPU_ENABLE=1); then NCCL >= 2.30.4 is preloaded (LD_PRELOAD). Results
are compared with epbuf/reference.py, bit for bit: tokens and weights are small whole numbers.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.engines.nccl_ep_library import missing

STAGE_LIMIT_S = 240  # the first launch of each kernel compiles it


class Smoke:
    def __init__(self, options: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.config = epbuf.EpConfig(
            num_ranks=self.num_ranks, num_experts=options.experts, num_topk=options.topk, hidden=options.hidden,
            max_tokens_per_rank=options.tokens, expert_alignment=16, max_num_sms=options.sms,
        )  # fmt: skip
        self.ranks = range(self.num_ranks)
        self.draw(0)

    def draw(self, seed: int) -> None:
        """Draw all ranks' inputs on every rank: one id in eight is no expert, and so are all of token 0."""
        generator, config = torch.Generator().manual_seed(seed), self.config
        shape = config.max_tokens_per_rank, config.num_topk

        def whole(*sizes: int) -> Tensor:
            return torch.randint(-3, 4, sizes, generator=generator)

        self.ids, self.x, self.weights, self.dy = [], [], [], []
        for _ in self.ranks:
            ids = torch.rand(shape[0], config.num_experts, generator=generator).topk(shape[1]).indices
            ids = ids.masked_fill(torch.rand(shape, generator=generator) < 0.125, -1)
            ids[0] = -1
            self.ids.append(ids)
            self.x.append(whole(shape[0], config.hidden).bfloat16())
            self.weights.append(whole(*shape).float())
            self.dy.append(whole(shape[0], config.hidden).bfloat16())
        self.capacity = epbuf.Plan.build(config).capacity_rows
        self.routing = reference.route(config, self.capacity, self.ids)
        self.end = int(self.routing.offs[self.rank][-1])

    def mine(self, parts: list[Tensor]) -> Tensor:
        return parts[self.rank].cuda()

    def stage(self, name: str, run: Callable[[], str | None]) -> None:
        faulthandler.dump_traceback_later(STAGE_LIMIT_S, exit=True)
        print(f"rank {self.rank}: {name} ...", flush=True)
        found = run()
        torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        dist.barrier()
        if self.rank == 0:
            print(f"OK {name}{f': {found}' if found else ''}", flush=True)

    def run(self) -> None:
        self.stage("extra", self.extra)
        self.stage("open", self.open)
        for name in ("route", "dispatch", "combine", "backward", "weighted", "captured", "empty", "repeated"):
            self.stage(name, getattr(self, name))
        self.stage("close", self.close)
        self.stage("mxfp8", self.mxfp8)

    def extra(self) -> str | None:
        trouble = missing()
        if trouble:
            raise SystemExit(trouble)
        return None

    def open(self) -> str:
        plan = epbuf.Plan.build(self.config, epbuf.Schedule(2), engine="nccl_ep")
        self.arena = epbuf.Arena.open(plan, dist.group.WORLD, device="cuda", engine="nccl_ep")
        engine = self.arena.memory.engine
        bindings = __import__("nccl._extensions.bindings.nccl_ep", fromlist=["x"])
        library = engine._lib  # type: ignore[attr-defined]
        needed = bindings.handle_mem_size(
            library._group.ptr,
            int(library.ep.Layout.EXPERT_MAJOR),
            library._handle_config._lowpp.ptr,
            self.config.num_topk,
        )
        return f"handle memory: the library asks for {needed:,}, planned {plan.region('nccl_ep_handle').nbytes:,}"

    def route(self) -> None:
        with self.arena.acquire() as lease, torch.no_grad():
            recv = epbuf.dispatch(lease, self.mine(self.x), self.mine(self.ids), self.mine(self.weights))
            for name in ("offs", "tokens_per_expert", "valid_tokens_per_expert", "total_recv_tokens"):
                same(name, getattr(recv, name), getattr(self.routing, name)[self.rank])
            same("overflow", recv.overflow, self.routing.overflow)
            epbuf.combine(lease, recv.tokens)

    def dispatch(self) -> None:
        tokens, weights, _ = reference.dispatch(self.config, self.capacity, self.routing, self.x, self.weights)
        with self.arena.acquire() as lease, torch.no_grad():
            for region in (lease.recv_tokens, lease.recv_topk_weights):
                region.fill_(float("nan"))
            recv = epbuf.dispatch(lease, self.mine(self.x), self.mine(self.ids), self.mine(self.weights))
            same("recv.tokens (order of rows, padding)", recv.tokens[: self.end], tokens[self.rank][: self.end])
            same("recv.topk_weights (padding 0)", recv.topk_weights[: self.end], weights[self.rank][: self.end])
            epbuf.combine(lease, recv.tokens)

    def combine(self) -> None:
        tokens, _, _ = reference.dispatch(self.config, self.capacity, self.routing, self.x, self.weights)
        want = reference.combine(self.config, self.routing, tokens, None)[self.rank]
        with self.arena.acquire() as lease, torch.no_grad():
            recv = epbuf.dispatch(lease, self.mine(self.x), self.mine(self.ids), self.mine(self.weights))
            before = recv.tokens[: self.end].clone()
            out = torch.full_like(self.mine(self.x), float("nan"))
            same("y, also of tokens without an expert", epbuf.combine(lease, recv.tokens, out=out), want)
            same("what combine read", recv.tokens[: self.end], before.cpu())

    def backward(self) -> None:
        self._backward(weighted=False)

    def weighted(self) -> None:
        self._backward(weighted=True)

    def _backward(self, *, weighted: bool) -> None:
        x, weights = self.mine(self.x).requires_grad_(), self.mine(self.weights).requires_grad_()
        tokens, row_weights, _ = reference.dispatch(self.config, self.capacity, self.routing, self.x, self.weights)
        with self.arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, self.mine(self.ids), weights)
            y = epbuf.combine(lease, recv.tokens, topk_weights=recv.topk_weights if weighted else None)
            dx, dw = torch.autograd.grad(y, [x, weights], self.mine(self.dy), allow_unused=True, materialize_grads=True)
        if weighted:
            grads, grad_weights = reference.combine_backward_weighted(
                self.config, self.capacity, self.routing, self.dy, tokens, row_weights
            )
        else:
            grads = reference.combine_backward(self.config, self.capacity, self.routing, self.dy)
            grad_weights = [torch.zeros(self.capacity) for _ in self.ranks]
        want_dx, want_dw = reference.dispatch_backward(self.config, self.routing, grads, grad_weights)
        same(
            "y",
            y.detach(),
            reference.combine(self.config, self.routing, tokens, row_weights if weighted else None)[self.rank],
        )
        same("dx", dx, want_dx[self.rank])
        same("dw", dw, want_dw[self.rank])

    def captured(self) -> str:
        def step(x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
            x = x.clone().requires_grad_()
            with self.arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids, weights)
                y = epbuf.combine(lease, recv.tokens)
                (dx,) = torch.autograd.grad(y, x, dy)
            return y.detach(), dx

        parts = (self.x, self.ids, self.weights, self.dy)
        steps = [epbuf.CapturedStep.capture(self.arena, step, [self.mine(p) for p in parts]) for _ in range(2)]
        for seed in range(100):
            self.draw(1 + seed)
            parts = (self.x, self.ids, self.weights, self.dy)
            y, dx = steps[seed % 2](*(self.mine(p) for p in parts))
            live = (self.ids[self.rank] >= 0).sum(1, keepdim=True)
            same(f"y of replay {seed}", y, (self.x[self.rank].float() * live).bfloat16())
            same(f"dx of replay {seed}", dx, (self.dy[self.rank].float() * live).bfloat16())
        for each in steps:
            each.check()
            each.close()
        return "100 replays of two graphs"

    def empty(self) -> None:
        """One rank has no tokens."""
        num = 0 if self.rank == 1 else len(self.x[0])
        x = self.mine(self.x)[:num].requires_grad_()
        with self.arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, self.mine(self.ids)[:num], self.mine(self.weights)[:num])
            y = epbuf.combine(lease, recv.tokens)
            torch.autograd.grad(y, x, torch.ones_like(y))
        live = (self.ids[self.rank][:num] >= 0).sum(1, keepdim=True)
        same("y", y.detach(), (self.x[self.rank][:num].float() * live).bfloat16())

    def repeated(self) -> str:
        ids = self.mine(self.ids).clone()
        if self.rank == 1:
            ids[1] = 0
        with self.arena.acquire() as lease, torch.no_grad():
            try:
                epbuf.dispatch(lease, self.mine(self.x), ids)
            except epbuf.errors.ConfigError as error:
                return str(error).splitlines()[0]
        raise AssertionError("a repeated expert was not refused")

    def close(self) -> None:
        self.arena.close()

    def mxfp8(self) -> None:
        self.config = epbuf.EpConfig(**{**dict(self.config), "dispatch_payload": "mxfp8"})
        self.draw(7)
        payload = epbuf.Payload.mxfp8()
        want = reference.dispatch_quantised(self.config, self.capacity, self.routing, payload, self.x)[self.rank]
        mine = reference.quantise(payload, self.x[self.rank])
        data, scales = mine.data.view(torch.float8_e4m3fn).cuda(), mine.scales.view(torch.float8_e8m0fnu).cuda()
        plan = epbuf.Plan.build(self.config, engine="nccl_ep")
        arena = epbuf.Arena.open(plan, dist.group.WORLD, device="cuda", engine="nccl_ep")
        with arena, arena.acquire() as lease, torch.no_grad():
            lease.recv_tokens.view(torch.uint8).fill_(0xFF)
            recv = epbuf.dispatch(lease, data, self.mine(self.ids), self.mine(self.weights), x_scales=scales)
            assert recv.scales is not None
            same("data", recv.tokens.view(torch.uint8)[: self.end], want.data[: self.end])
            same("scales (padding 0)", recv.scales.view(torch.uint8)[: self.end], want.scales[: self.end])
            decoded = reference.dequantise(payload, want, torch.bfloat16)
            same("dequantize()", recv.dequantize()[: self.end], decoded[: self.end])


def same(what: str, found: Tensor, wanted: Tensor) -> None:
    """Compare every element; -0 equals +0."""
    found = found.cpu()
    if not torch.equal(found, wanted):
        where = (found != wanted).nonzero()
        first = tuple(where[0].tolist()) if len(where) else "shape or dtype"
        raise AssertionError(
            f"rank {dist.get_rank()}: {what}: {len(where)} of {found.numel()} differ, first at {first}: "
            f"{found[first] if len(where) else (found.shape, found.dtype)} instead of "
            f"{wanted[first] if len(where) else (wanted.shape, wanted.dtype)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 64), ("hidden", 512), ("experts", 32), ("topk", 4), ("sms", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    Smoke(parser.parse_args()).run()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what is tried is the engine's teardown, not the process's


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
