"""The task `text` under a tokeniser, past its training length, and with masked tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models

import experiments
from experiments import cli, config
from experiments.corpus.sources import EMBEDDED
from experiments.module import Training
from experiments.tasks.base import NOT_SCORED, Scores, collate, loader
from experiments.tasks.text import Text

SENTENCES = "".join(f"Die {i}. Tanne 🌲 steht schön am Bach, und {i * i} Vögel singen dort.\n" for i in range(300))


@pytest.fixture
def text(tmp_path):
    def make(**options):
        (tmp_path / "text.txt").write_text(SENTENCES, encoding="utf-8")
        return Text(**({"path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "length": 16} | options))

    return make


@pytest.fixture
def bpe(text):
    return text(tokenizer="bpe", vocabulary=400, factors=(1, 2, 4))


def words(folder):
    """A file with a tokeniser that loses what it does not know."""
    inner = tokenizers.Tokenizer(models.WordLevel({"?": 0, "Die": 1, "Bach,": 2}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "words.json"))
    return str(folder / "words.json")


def scored(suite, name):
    """The field `name` at the scored positions of a suite."""
    return torch.cat([item[name][item["labels"] != NOT_SCORED] for item in suite])


def test_every_tokeniser_holds_out_the_same_text(text, bpe):
    plain = text()
    for split in ("train", "validation", "test"):
        tokens = [bpe.tokens[i] for i in bpe.part(split)]
        assert bpe.tokeniser.decode(tokens).encode() == bytes(plain.tokens[i] for i in plain.part(split))


def test_bits_per_byte_are_the_same_whatever_the_tokeniser(text, bpe):
    """A model that gives every byte of the text the probability 1/256, said in two languages: 8 bits a byte.

    By hand: a token of b bytes has probability 256^-b then, and b ln 256 nats; a further id has what is left.
    """
    letters = torch.tensor([len(bpe.tokeniser.inner.id_to_token(i)) for i in range(400)], dtype=torch.float64)
    chances = torch.cat([256.0**-letters, torch.zeros(1, dtype=torch.float64)])
    chances[-1] = 1 - chances.sum()
    for task, logits in ((text(), torch.zeros(256)), (bpe, chances.clamp_min(1e-300).log())):
        for name, suite in task.suites("test").items():
            scores = Scores(task.metrics)
            for batch in loader(suite, 7):
                seen = logits.expand(*batch["labels"].shape, -1)
                scores.add(seen, batch["labels"], bytes=batch["bytes"], context=batch["context"])
            # One token of the part is not scored, and a character of several tokens may lie at the end of a window.
            assert scores.result()["bits_per_byte"] == pytest.approx(8, rel=2e-3), name


def test_bits_per_byte_of_a_case_by_hand(bpe):
    # Three tokens of 1, 4 and 5 bytes at a loss of 2 nats each: 6 nats over 10 bytes.
    logits = torch.tensor([0.0, math.log(math.e**2 - 1)]).expand(3, 2)
    sums = bpe.metrics(logits, torch.zeros(3, dtype=torch.int64), bytes=torch.tensor([1, 4, 5]))
    assert sums["loss"] == (pytest.approx(6), 3) and sums["bits_per_byte"] == (pytest.approx(6 / math.log(2)), 10)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_length_scores_the_same_tokens_once_and_bytes_are_those_of_the_labels(text, tokenizer):
    task = text(tokenizer=tokenizer, vocabulary=256 if tokenizer == "bytes" else 400, factors=(1, 2, 4))
    suites = task.suites("test")
    lengths = {name: len(suite[0]["tokens"]) for name, suite in suites.items()}
    assert lengths == {"text": 16, "text_x2": 32, "text_x4": 64}
    assert task.longest == 64 and list(task.suites("validation")) == ["text"]
    part = task.part("test")
    for suite in suites.values():
        assert scored(suite, "labels").tolist() == [int(task.tokens[i]) for i in part[1:]]
        size = scored(suite, "bytes").sum().item()
        first = len(task.tokeniser.decode([int(task.tokens[part[0]])]).encode())
        assert size == len(task.corpus.text) - len(task.corpus.text) * 19 // 20 - first


def test_fewer_rows_are_as_many_tokens_at_every_length(text):
    suites = text(factors=(1, 2, 4), rows_per_suite=8).suites("test")
    assert [len(suite) for suite in suites.values()] == [8, 4, 2]


def test_the_loss_is_told_by_how_much_was_read(text):
    task = text(length=9, rows_per_suite=2)
    # The loss at place i is i + 1 nats: ln(1 + x) of a logit ln x against the label's 0.
    nats = torch.arange(1, 10, dtype=torch.float64).repeat(2, 1)
    logits = torch.stack([torch.zeros(2, 9), torch.log(torch.expm1(nats))], -1)
    batch = next(iter(loader(task.suites("test")["text"], 2)))
    sums = task.metrics(logits, torch.zeros(2, 9, dtype=torch.int64), context=batch["context"])
    means = {name: total / count for name, (total, count) in sums.items()}
    assert means == pytest.approx(
        {"loss": 5, "loss_at_1": 1, "loss_at_2": 2, "loss_at_4": 3.5, "loss_at_8": 6.5, "loss_at_16": 9}
    )


def test_what_was_read_is_counted_from_the_beginning_of_the_document(text):
    suite = text(separator="\\n", length=200, rows_per_suite=1).suites("test")["text"]
    documents, context = suite[0]["documents"].tolist(), suite[0]["context"].tolist()
    assert len(set(documents)) > 2
    assert context == [documents[: i + 1].count(document) for i, document in enumerate(documents)]


def test_documents_begin_at_the_same_places_of_the_text(text):
    task = text(tokenizer="bpe", vocabulary=400, separator="\\n")
    decoded = task.tokeniser.decode(task.tokens.tolist())
    assert decoded == SENTENCES
    for start in task.starts.tolist():
        assert task.tokeniser.decode(task.tokens[start - 3 : start].tolist()).endswith("\n")
    assert len(task.starts) == 299
    row = task.row(int(task.starts[0]) - 2)
    assert row["documents"].tolist()[:4] == [1, 1, 2, 2] and int(row["labels"][1]) == NOT_SCORED


def test_the_files_of_a_folder_are_one_text(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name[0] * 300)
    task = Text(path=str(tmp_path), glob="*.txt", length=8)
    assert bytes(task.tokens) == b"a" * 300 + b"b" * 300 and task.starts.tolist() == [300]
    assert task.row(296)["documents"].tolist() == [1] * 4 + [2] * 4


def test_a_tokeniser_that_loses_something_has_no_bits_per_byte(text, tmp_path, caplog):
    task = text(tokenizer=words(tmp_path), length=8)
    assert "does not give the text back" in caplog.text and task.vocabulary == 3
    assert "bytes" not in task.suites("validation")["text"][0]


def test_a_folder_of_text_that_is_not_utf_8_is_refused_by_a_tokeniser_alone(tmp_path):
    (tmp_path / "text").write_bytes(b"\xfe\xff" * 400)
    options = {"path": str(tmp_path / "text"), "length": 8, "cache": str(tmp_path / "cache")}
    assert Text(**options).vocabulary == 256
    with pytest.raises(ValueError, match=r"path='.*text' is not UTF-8 at byte 0; tokenizer=bytes takes any bytes"):
        Text(**options, tokenizer="bpe")


def test_the_key_stands_for_the_tokeniser_and_not_for_its_place(text, tmp_path, plan_of):
    def key(**options):
        task = {"name": "text", "path": str(tmp_path / "text.txt"), "length": 8, "cache": str(tmp_path / "c")} | options
        return config.plan(base | {"task": task}).key

    base = {**plan_of("stack=gqa").config, "stack": "gqa", "sweep": None, "runs": "runs", "mlflow": False}
    bpe = text(tokenizer="bpe", vocabulary=300)
    (tmp_path / "file.json").write_text(bpe.tokeniser.json)
    one = key(tokenizer="bpe", vocabulary=300)
    assert key(tokenizer=str(tmp_path / "file.json"), cache=str(tmp_path / "d")) == one
    assert len({one, key(), key(tokenizer="bpe", vocabulary=301), key(tokenizer=words(tmp_path))}) == 4


# Masked language modelling.


def test_masked_rows_are_the_text_with_a_mask_behind_the_vocabulary(text):
    task, plain = text(objective="mlm"), text()
    assert (task.vocabulary, plain.vocabulary) == (257, 256)
    rows, others = task.train_dataset(3, 200), plain.train_dataset(3, 200)
    masks = 0
    for row, other in zip(rows, others, strict=True):
        asked = row["labels"] != NOT_SCORED
        assert asked.sum() == 2 and torch.equal(row["labels"][asked], other["tokens"][asked])
        assert torch.equal(row["tokens"][~asked], other["tokens"][~asked])
        masks += (row["tokens"] == 256).sum().item()
    assert abs(masks - 320) < 4 * math.sqrt(400 * 0.16)


def test_the_choice_depends_on_seed_and_row_alone_and_is_frozen_in_suites(text):
    task = text(objective="mlm")
    few, many = task.train_dataset(3, 8), task.train_dataset(3, 500)
    backwards = [few[i]["labels"] for i in reversed(range(8))][::-1]
    assert all(torch.equal(many[i]["labels"], backwards[i]) for i in range(8))
    assert torch.equal(torch.cat([batch["labels"] for batch in loader(few, 3, workers=2)]), torch.stack(backwards))
    assert not torch.equal(task.train_dataset(4, 1)[0]["labels"], backwards[0])
    for split in ("validation", "test"):
        one, other = (text(objective="mlm").suites(split)["text"] for _ in range(2))
        assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_masked_documents_are_kept_apart_and_their_first_tokens_are_asked_for_too(text):
    task = text(objective="mlm", separator="\\n", length=200)
    row = task.row(0, rng=task.train_dataset(0, 1).streams(0))
    assert int(row["documents"].max()) > 2 and (row["labels"] != NOT_SCORED).sum() == 30


def test_metrics_of_masked_tokens_are_loss_and_accuracy(text):
    task = text(objective="mlm")
    scores = Scores(task.metrics)
    batch = collate([task.suites("test")["text"][i] for i in range(3)])
    scores.add(torch.zeros(*batch["labels"].shape, 257), batch["labels"])
    assert scores.result() == {"loss": pytest.approx(math.log(257)), "accuracy": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stack=gqa", "task.objective=mlm"),
         "needs a stack that sees both sides of a hidden token, and gqa is causal: allowed are stack=bert"),
        (("stack=bert",), "objective=next asks for the next token, and bert would see it: .*mixers.NAME.causal=true"),
        (("stack=mha", "model.mixers.mha.causal=false"), "asks for the next token, and mha would see it"),
        (("stack=gqa", "task.objective=mml"), r"objective='mml' is not allowed \(did you mean 'mlm'\?\)"),
    ],
)  # fmt: skip
def test_a_stack_that_does_not_fit_the_objective_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        config.plan(cli.composed("train", ["task=text", *words]))


@pytest.mark.parametrize("words", [("stack=bert", "model.mixers.mha.causal=true"), ("stack=bert", "task.objective=mlm"),
                                   ("model.layout=mha", "model.mixers.mha.causal=false", "task.objective=mlm")])
def test_a_stack_that_fits_is_taken(words):
    plan = config.plan(cli.composed("train", ["task=text", *words]))
    assert plan.skeleton.causal == (plan.config["task"]["objective"] == "next")


@pytest.mark.slow
def test_a_masked_letter_that_only_the_right_side_tells_is_learnt(tmp_path, command_line):
    # "ab" or "cd": the first letter is known from the one behind it alone, and 0.75 is all that the left side is worth.
    pairs = np.random.default_rng(0).integers(2, size=10_000)
    (tmp_path / "text.txt").write_text("".join("abcd"[2 * i : 2 * i + 2] for i in pairs))
    code, out, _ = command_line(
        "model.layout=mha", "model.mixers.mha.causal=false", "task=text", f"task.path={tmp_path / 'text.txt'}",
        "task.objective=mlm", "task.length=32", "model.d_model=32", "model.n_layers=2", "model.init_std=0.1",
        "optimizer.lr=1e-2", "trainer.steps=100", "trainer.batch_size=16", "trainer.threads=1", "mlflow=false",
        tiny=False,
    )
    assert code == 0
    assert float(out.rsplit("val/accuracy ", 1)[1].split()[0]) > 0.85


# Runs and their tokenisers.


OPTIONS = (
    "stack=gqa", "task=text", "task.length=16", "task.rows_per_suite=4", "model.d_model=8", "model.mlp=none",
    "trainer.steps=2", "trainer.batch_size=2", "trainer.threads=1", "mlflow=false",
)  # fmt: skip


def test_a_run_keeps_its_tokeniser_and_says_when_another_one_is_put_in_its_place(text, tmp_path, command_line):
    bpe = text(tokenizer="bpe", vocabulary=300)
    arguments = (*OPTIONS, f"task.path={tmp_path / 'text.txt'}", f"task.cache={tmp_path / 'cache'}")
    bpe_options = ("task.tokenizer=bpe", "task.vocabulary=300", "task.factors=[1,2]")
    code, out, _ = command_line(*arguments, *bpe_options, tiny=False)
    assert code == 0, out
    folder = next((tmp_path / "runs").glob("*/status.json")).parent
    lines = (folder / "metrics.jsonl").read_text()
    assert all(name in lines for name in ("eval/text_x2/bits_per_byte", "eval/text/loss_at_16", "val/bits_per_byte"))
    assert "val/loss_at" not in lines
    assert experiments.tokeniser(folder).encode("Die Tanne") == bpe.tokeniser.encode("Die Tanne")

    # Of the same size, so that the weights would fit.
    (tmp_path / "other.txt").write_text(SENTENCES.swapcase(), encoding="utf-8")
    other = text(path=str(tmp_path / "other.txt"), tokenizer="bpe", vocabulary=300)
    assert other.tokeniser.digest != bpe.tokeniser.digest
    (tmp_path / "other.json").write_text(other.tokeniser.json)
    code, _, err = command_line(f"resume={folder}", "task=text", f"task.tokenizer={tmp_path / 'other.json'}",
                                "task.vocabulary=300", "trainer.steps=4", "mlflow=false", tiny=False)  # fmt: skip
    assert code == 2 and "resume: task.tokenizer=" in err and "is not the tokeniser that" in err
    (folder / "tokenizer.json").write_text(other.tokeniser.json)
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokeniser that .*step=2.ckpt was trained with"):
        experiments.tokeniser(folder)


def test_runs_on_bytes_and_on_other_tasks_have_the_tokeniser_that_they_have(text, tmp_path, command_line):
    text()
    assert command_line(*OPTIONS, f"task.path={tmp_path / 'text.txt'}", tiny=False)[0] == 0
    folder = next((tmp_path / "runs").glob("*/status.json")).parent
    assert experiments.tokeniser(folder.name, tmp_path / "runs").decode([97]) == "a"
    assert command_line("stack=gqa", "mlflow=false", "runs=others")[0] == 0
    other = next((tmp_path / "others").glob("*/status.json")).parent
    with pytest.raises(ValueError, match=r"run='.*' is of task=mqar, whose tokens stand for no text"):
        experiments.tokeniser(other)


def test_evaluation_hands_the_sizes_of_the_scored_tokens_to_the_metrics(text, plan_of):
    plan = plan_of("stack=gqa")
    task = text(tokenizer="bpe", vocabulary=300)
    object.__setattr__(plan, "task", task)
    training = Training(config._model(plan.settings.model, task), plan)
    training.scores, direct = [task.scores()], task.scores()
    for batch in loader(task.suites("test")["text"], 5):
        direct.add(training.net(batch["tokens"]), batch["labels"], bytes=batch["bytes"], context=batch["context"])
        training.validation_step(training.on_before_batch_transfer(batch, 0), 0)
    assert training.scores[0].result() == pytest.approx(direct.result(), rel=1e-5)


def test_the_embedded_text_needs_no_cache():
    assert EMBEDDED.is_file() and Text().sizes is None
