"""Trains the tiny model that recalls facts and writes its weights. About three minutes on one core.

    python tools/train_recall.py [--seed 0] [--out src/phloem/runtime/integrations/data]

Each training row is eight facts and twelve questions with their answers; only the answers count.
It stops when a check on fresh facts, one question each, reaches the goal.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch.nn import functional

from phloem.runtime.integrations.recall import FACTS, Facts, build_recall_model

ROWS, QUESTIONS, STEPS_MAX, CHECK_EVERY = 64, 12, 3000, 50
GOAL = 0.995


def training_rows(rng: Random) -> torch.Tensor:
    """Tokens [ROWS, 2 * FACTS + 2 * QUESTIONS]."""
    rows: list[list[int]] = []
    for _ in range(ROWS):
        facts = Facts.draw(rng)
        asked = rng.choices(range(FACTS), k=QUESTIONS)
        dialogue = [t for fact in asked for t in (facts.question(fact), facts.answer(fact))]
        rows.append(facts.prefix() + dialogue)
    return torch.tensor(rows)


@torch.no_grad()
def accuracy(model: torch.nn.Module, rng: Random, prompts: int) -> float:
    """How often the first answer after the facts is right."""
    rows, answers = [], []
    for _ in range(prompts):
        facts, fact = Facts.draw(rng), rng.randrange(FACTS)
        rows.append([*facts.prefix(), facts.question(fact)])
        answers.append(facts.answer(fact))
    logits = model(input_ids=torch.tensor(rows), use_cache=False).logits[:, -1]
    return float((logits.argmax(-1) == torch.tensor(answers)).float().mean())


def train(model: torch.nn.Module, rng: Random) -> float:
    """Trains in place; returns the accuracy on fresh facts."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0, betas=(0.9, 0.98))
    questions = torch.arange(2 * FACTS, 2 * (FACTS + QUESTIONS), 2)
    reached = 0.0
    for step in range(STEPS_MAX):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        rows = training_rows(rng)
        logits = model(input_ids=rows, use_cache=False).logits[:, questions]
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, questions + 1].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == CHECK_EVERY - 1:
            reached = accuracy(model, rng, 512)
            print(
                f"step {step + 1}: loss {float(loss.detach()):.3f}, recall {reached:.3f}",
                flush=True,
            )
            if reached >= GOAL:
                break
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("src/phloem/runtime/integrations/data"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build_recall_model(arguments.seed)
    reached = train(model, Random(arguments.seed))
    if reached < GOAL:
        print(f"recall stayed at {reached:.3f}, below {GOAL}: nothing was written")
        return 1
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, arguments.out / "recall.safetensors")
    size = (arguments.out / "recall.safetensors").stat().st_size
    print(f"wrote {size / 1024:.0f} KiB, recall {reached:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
