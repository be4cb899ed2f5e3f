"""The rules of transduction by hand, whole answers counted across batches, and a run of an encoder-decoder."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import experiments
from analysis import alignment
from experiments import cli, config, tasks
from experiments.tasks.base import NOT_SCORED, collate
from experiments.tasks.transduction import WORDS, AnswerScores, number, words

SPOKEN = {
    0: "zero", 7: "seven", 10: "ten", 13: "thirteen", 20: "twenty", 45: "forty five", 100: "one hundred",
    204: "two hundred four", 999: "nine hundred ninety nine", 1000: "one thousand", 10_010: "ten thousand ten",
    1_000_002: "one million two", 300_400_000: "three hundred million four hundred thousand",
    999_000_000_000_011: "nine hundred ninety nine trillion eleven",
}


@pytest.mark.parametrize("value", SPOKEN)
def test_numbers_by_hand(value):
    digits = [int(digit) for digit in str(value)]
    said = words(digits)
    assert " ".join(WORDS[i - 10] for i in said) == SPOKEN[value]
    assert number(said) == digits


@pytest.mark.parametrize(("rule", "answer"), [("reverse", [2, 0, 0, 4]), ("sort", [0, 0, 2, 4])])
def test_rules_by_hand(rule, answer):
    task = tasks.get("transduction")(rule=rule, vocabulary=8)
    found = task.oracle(np.array([4, 0, 0, 2, 6, *answer]))
    assert found.tolist() == [*[NOT_SCORED] * 4, *answer, 7]


@pytest.mark.parametrize("rule", ["reverse", "sort", "digits"])
def test_apart_and_in_one_piece_are_the_same_rows(rule):
    options = {"rule": rule, "size": 9, "test_size": [6, 9], "rows_per_suite": 16}
    whole, apart = (tasks.get("transduction")(apart=apart, **options) for apart in (False, True))
    for split in ("validation", "test"):
        for name, suite in whole.suites(split).items():
            for one, two in zip(suite, apart.suites(split)[name], strict=True):
                assert torch.equal(one["tokens"], torch.cat([two["source"], two["tokens"]]))
                assert torch.equal(one["labels"][len(two["source"]) :], two["labels"])
                scored = one["labels"] != NOT_SCORED
                assert (whole.oracle(one["tokens"].numpy())[scored] == one["labels"][scored].numpy()).all()
    assert apart.length == max(len(apart.train_dataset(0, 200)[i]["tokens"]) for i in range(200)) == 10
    # "nine hundred ninety nine million" and so on: 4 words a group, and two scales.
    assert whole.length == {"digits": 10 + 14}.get(rule, 10 + 9)
    assert max(len(words([9] * n)) for n in range(1, 10)) == 14


def test_a_batch_pads_sources_for_themselves():
    items = [{"source": torch.tensor(s), "tokens": torch.tensor(t), "labels": torch.tensor(t)}
             for s, t in (([1, 2, 3], [6]), ([4], [6]))]  # fmt: skip
    batch = collate(items)
    assert batch["source"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["source_documents"].tolist() == [[1, 1, 1], [1, 0, 0]] and "documents" not in batch


@pytest.mark.parametrize("cut", range(8))
def test_whole_answers_are_counted_wherever_a_batch_is_cut(cut):
    """Three answers with end 3: right; wrong in the middle; wrong at its end."""
    labels = torch.tensor([1, 2, 3, 1, 1, 3, 3])
    said = torch.tensor([1, 2, 3, 1, 0, 3, 1])
    logits, scores = torch.eye(4)[said], AnswerScores(3)
    scores.add(logits[:cut], labels[:cut])
    scores.add(logits[cut:], labels[cut:])
    assert scores.result()["sequence_accuracy"] == 1 / 3
    assert scores.result()["accuracy"] == 5 / 7


TINY = (
    "model=encoder_decoder", "model.layout=mha + cross", "task=transduction", "task.apart=true", "model.d_model=8",
    "task.size=4", "task.test_size=[4,6]", "task.rows_per_suite=8",
)


def test_a_run_trains_logs_and_loads_again(command_line, tmp_path, read_events):
    code, _, err = command_line(
        *TINY, "trainer.steps=3", "trainer.batch_size=4", "trainer.threads=1", "mlflow=false", tiny=False)
    assert (code, err) == (0, "")
    folder = next((tmp_path / "runs").glob("*/status.json")).parent
    logged = {metric for event in read_events(folder) for metric in event["metrics"]}
    assert {"train/loss", "val/sequence_accuracy", "eval/size6/sequence_accuracy", "eval/size6/loss"} <= logged
    model = experiments.load(folder)
    assert len(model.transduce([[1, 2], [3]], [[26], [26]], 5, stop=27)) == 2
    # One row of the trained size: 4 letters and the end, from 4 letters, for the one head of the one such layer.
    page = alignment.figure(str(folder), row=1)
    cells, = (np.array(trace.z) for trace in page.data)
    assert cells.shape == (5, 4) and np.allclose(cells.sum(1), 1, atol=1e-6)
    wrong = ({"suite": "size5"}, "suite=size5 does not exist"), ({"row": 8}, "row=8 must be from 0 to 7")
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            alignment.figure(str(folder), **options)


def test_the_metrics_of_a_ragged_batch_are_those_of_its_rows():
    """Through the module: greedy generation of an answer is right where `sequence_accuracy` says so."""
    from experiments.module import Training

    plan = config.plan(cli.composed("train", [*TINY, "task.rule=digits", "task.rows_per_suite=4"]))
    module = Training(plan.model(), plan).eval()
    items = [plan.task.train_dataset(0, 6)[i] for i in range(6)]
    with torch.no_grad():
        together = module.labelled(module.on_before_batch_transfer(collate(items), 0))
        alone = [module.labelled(module.on_before_batch_transfer(collate([item]), 0)) for item in items]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_two_spellings_of_an_encoder_are_one_run():
    key = config.plan(cli.composed("train", TINY)).key
    own = "+model.encoder.mixers.mha.causal"
    for same in ("model.encoder.n_layers=2", "model.encoder.layout=mha + mha", f"{own}=false"):
        assert config.plan(cli.composed("train", [*TINY, same])).key == key
    for other in ("model.encoder.layout=gqa", "model.encoder.n_layers=3", "model.share_embeddings=false",
                  "model.mixers.cross.mixer=gqa", f"{own}=true"):
        assert config.plan(cli.composed("train", [*TINY, other])).key != key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.layout=mha"], "layout 'mha' has no cross-attending layer"),
        (["task=mqar"], "an encoder needs a source, and task=mqar has none"),
        (["task.apart=false"], "an encoder needs a source, and task=transduction has none"),
        (["+model.encoder.d_model=3"], "encoder has no option 'd_model'"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    tiny = [option for option in TINY if not (options[0] == "task=mqar" and option.startswith("task"))]
    with pytest.raises(ValueError, match=re.escape(message)):
        config.plan(cli.composed("train", [*tiny, *options]))


def test_a_language_model_needs_its_source_in_one_piece():
    with pytest.raises(ValueError, match=r"has a source apart: it needs model=encoder_decoder, or task\.apart=false"):
        config.plan(cli.composed("train", ["task=transduction", "task.apart=true"]))
