"""`python -m experiments.generate`: the model of a run, asked on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import experiments
from experiments import generate, train

TINY = ("model.d_model=8", "model.mlp=none", "task.rows_per_suite=4", "trainer.steps=2",
        "trainer.batch_size=2", "trainer.threads=1", "mlflow=false")
OF = {
    "text": ("task=text", "task.length=16"),
    "mqar": ("task.length=16", "task.vocabulary=32", "task.kv=[2]", "task.test_kv=[2]"),
    "reverse": ("model=encoder_decoder", "model.layout=mha + cross", "task=transduction", "task.apart=true",
                "task.size=4", "task.test_size=[4]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where there are three runs: runs/text of text, runs/mqar of ids, runs/reverse with an encoder."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in OF.items():
            patch.setattr(sys, "argv", ["train", *TINY, *options])
            assert train.main() == 0
            made, = (path.parent for path in Path("runs").glob("*/status.json") if path.parent.name not in OF)
            made.rename(f"runs/{name}")
    return folder


@pytest.fixture
def ask(folder, monkeypatch, capsys):
    """Call the program: exit code, what it printed, its errors."""

    def call(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["generate", *arguments])
        capsys.readouterr()
        code = generate.main()
        return code, *capsys.readouterr()

    return call


def test_a_text_run_continues_texts(ask, folder):
    code, out, err = ask("run=text", "prompt=To bé", "prompt=O, ", "max_new_tokens=9")
    assert (code, err) == (0, "")
    first, second = out.removesuffix("\n").split("\n---\n")
    model = experiments.load(folder / "runs" / "text")
    said = model.generate([list("To bé".encode()), list(b"O, ")], 9)
    assert first == "To bé" + bytes(said[0].tolist()).decode(errors="replace")
    assert second == "O, " + bytes(said[1].tolist()).decode(errors="replace")


def test_draws_are_repeated_by_their_seed(ask):
    options = ("run=text", "prompt=a", "max_new_tokens=30", "temperature=1", "top_k=100", "top_p=0.99")
    first, again, other = (ask(*options, seed)[1] for seed in ("seed=1", "seed=1", "seed=2"))
    assert first == again != other


def test_other_runs_are_asked_in_ids(ask):
    code, out, _ = ask("run=runs/mqar", "prompt=3, 17 0 4", "max_new_tokens=2")
    assert code == 0
    said = [int(word) for word in out.split()]
    assert said[:4] == [3, 17, 0, 4] and len(said) == 6


def test_an_encoder_decoder_answers_sources(ask, folder):
    code, out, err = ask("run=reverse", "prompt=3 1 4", "prompt=1 5", "max_new_tokens=6")
    assert (code, err) == (0, "")
    model = experiments.load(folder / "runs" / "reverse")
    # 26 letters, then the signs that begin and end.
    said = model.transduce([[3, 1, 4], [1, 5]], [[26], [26]], 6, stop=27)
    assert out.removesuffix("\n").split("\n---\n") == [" ".join(map(str, row.tolist())) for row in said]
    first = said[0][0].item()
    assert ask("run=reverse", "prompt=3 1 4", "max_new_tokens=6", f"stop={first}")[1] == f"{first}\n"
    assert ask("run=reverse", "prompt=3 99", "max_new_tokens=6")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=a"], "run=... is missing"),
        (["run=text"], "prompt=... is missing"),
        (["run=nowhere", "prompt=a"], "run='nowhere' is no run"),
        (["run=text", "prompt="], "prompt 0 is empty"),
        (["run=text", "prompt=a", "temprature=1"], "temprature is no option (did you mean 'temperature'?)"),
        (["run=text", "prompt=a", "temperature=warm"], "temperature=warm must be a number"),
        (["run=text", "prompt=a", "max_new_tokens=2.5"], "max_new_tokens=2.5 must be a whole number"),
        (["run=text", "prompt=a", "temperature=-1"], "temperature=-1.0 must be a finite number of at least 0"),
        (["run=text", "prompt=a", "top_p=0.5"], "top_p=0.5 needs a temperature above 0"),
        (["run=text", "prompt=a", "stop=ab"], "stop='ab' must be one token; it is 2"),
        (["run=text", "prompt=a", "seed=-1"], "seed=-1 must be from 0 to "),
        (["run=text", "prompt=a", "seed=4294967297"], "seed=4294967297 must be from 0 to 4294967295"),
        (["run=text", "prompt=a", "loose"], "'loose' is no option"),
    ],
)
def test_mistakes_are_one_message(ask, arguments, message):
    code, out, err = ask(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_words_in_a_prompt_of_ids_are_refused(ask):
    code, _, err = ask("run=mqar", "prompt=3 four")
    assert code == 2 and "'four' is no id; a run of another task than text wants ids such as '3 17 4'" in err
