"""Routing maps and top-k: ascending experts, tokens with fewer of them, gradients, and back again."""

from __future__ import annotations

import pytest
import torch

from epbuf.integrations.megatron.routing import map_of_topk, topk_of_map
from epbuf.testing import assert_capture_safe


def draw(num_tokens: int, num_experts: int, num_topk: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a routing map in which tokens have up to K experts, and probabilities that are 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    for token in range(num_tokens):
        count = int(torch.randint(num_topk + 1, (), generator=generator))
        routing_map[token, torch.randperm(num_experts, generator=generator)[:count]] = True
    return routing_map, torch.rand(num_tokens, num_experts, generator=generator) * routing_map


@pytest.mark.parametrize(("num_experts", "num_topk"), [(8, 3), (4, 4), (3, 5)])
def test_topk_of_a_map_is_what_a_loop_finds(num_experts: int, num_topk: int) -> None:
    routing_map, probs = draw(50, num_experts, min(num_topk, num_experts))
    topk_idx, topk_weights = topk_of_map(routing_map, probs, num_topk)
    for token in range(50):
        experts = [expert for expert in range(num_experts) if routing_map[token, expert]]
        none = [-1] * (num_topk - len(experts))
        assert topk_idx[token].tolist() == experts + none
        assert topk_weights[token].tolist() == [probs[token, expert].item() for expert in experts] + [0.0] * len(none)


def test_map_of_topk_is_its_inverse() -> None:
    routing_map, probs = draw(50, 8, 3)
    again, weights = map_of_topk(*topk_of_map(routing_map, probs, 3), 8)
    assert torch.equal(again, routing_map)
    assert torch.equal(weights, probs)


def test_an_expert_of_probability_zero_is_still_chosen() -> None:
    topk_idx, topk_weights = topk_of_map(torch.tensor([[True, False, True]]), torch.tensor([[0.0, 0.9, 0.5]]), 2)
    assert topk_idx.tolist() == [[0, 2]]
    assert topk_weights.tolist() == [[0.0, 0.5]]


def test_no_token_gives_no_row() -> None:
    topk_idx, topk_weights = topk_of_map(*draw(0, 8, 3), 3)
    assert topk_idx.shape == topk_weights.shape == (0, 3)


def test_gradient_reaches_the_chosen_probabilities_only() -> None:
    routing_map, probs = draw(50, 8, 3)
    probs.requires_grad_()
    topk_idx, topk_weights = topk_of_map(routing_map, probs, 3)
    grad = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    topk_weights.backward(grad)
    assert torch.equal(probs.grad, map_of_topk(topk_idx, grad, 8)[1])
    assert (probs.grad[~routing_map] == 0).all()


def test_both_ways_may_be_captured() -> None:
    def both(routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return map_of_topk(*topk_of_map(routing_map, probs, 3), 8)

    seeds = iter(range(1, 10))
    assert_capture_safe(both, *draw(20, 8, 3), vary=lambda *_: draw(20, 8, 3, next(seeds)))
