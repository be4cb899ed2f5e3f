"""Training with Lightning, on runs of a second."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F

from arch import loss
from experiments import module
from experiments.early_stop import EarlyStop
from experiments.module import Diverged, Recorder, Training
from experiments.record import Description
from experiments.tasks.base import NOT_SCORED, collate
from experiments.tracking import Tracker


@pytest.fixture
def fit(tmp_path):
    """Train a plan without validation; returns what `module.fit` does, and the recorder."""

    def run(plan, *callbacks):
        tracker = Tracker(tmp_path / "run", Description("x", {}, plan.config, {}, ""))
        recorder = Recorder(plan, tracker, lambda line: None)
        with module.quiet():
            return *module.fit(plan, tracker, recorder, [], callbacks), recorder

    return run


@pytest.fixture
def train(tmp_path):
    """Train, validate and test a plan; returns the last values, the tracker and the lines that were said."""

    def run(plan):
        lines = []
        tracker = Tracker(tmp_path / "run", Description("x", {}, plan.config, {}, ""))
        return module.train(plan, tracker, lines.append), tracker, lines

    return run


class Watch(Callback):
    """The tokens of every batch and the learning rate of every step."""

    def __init__(self):
        self.batches, self.rates = [], []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.batches.append(batch["tokens"])

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def bare(plan, steps):
    """The definition: a plain loop over the same rows; the loss is the mean over the labelled tokens of a step."""
    model = plan.model()
    optimizer = plan.optimizer.build(model)
    rows = plan.trainer.batch_size * plan.trainer.accumulate
    data = plan.task.train_dataset(plan.settings.seed, plan.steps * rows)
    losses = []
    for step in range(steps):
        batch = collate([data[step * rows + i] for i in range(rows)])
        scored = batch["labels"] != NOT_SCORED
        for group in optimizer.param_groups:
            group["lr"] = plan.optimizer.lr * plan.optimizer.factor(plan.steps)(step)
        mean = F.cross_entropy(model(batch["tokens"])[scored], batch["labels"][scored])
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.optimizer.clip)
        optimizer.step()
        losses.append(mean.item())
    return model, losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_is_a_plain_loop_whose_loss_is_the_mean_over_labelled_tokens(plan_of, fit, accumulate):
    # Rows of 2, 4 and 8 labels: a mean of the means of batches would be another loss.
    plan = plan_of("task.kv=[1,2,4]", "task.length=16", "trainer.batch_size=2", f"trainer.accumulate={accumulate}",
                   "trainer.precision=64", "optimizer.clip=0.1", "optimizer.lr=0.05", "trainer.log_every=1")
    _, trained, recorder = fit(plan)
    expected, losses = bare(plan, plan.steps)
    assert recorder.values["train/loss"] == pytest.approx(losses[-1], rel=1e-4)
    for (name, got), wanted in zip(trained.net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=2e-3, atol=2e-5, msg=name)


def test_the_gradient_of_an_accumulated_step_is_that_of_one_large_batch(plan_of, fit):
    # Adam hardly sees a factor in its gradients, clipping does.
    def gradients(*batches):
        plan = plan_of("task.kv=[1,2,4]", "trainer.steps=1", "trainer.precision=64", "optimizer.clip=null", *batches)
        return [parameter.grad for parameter in fit(plan)[1].parameters()]

    parts = gradients("trainer.batch_size=2", "trainer.accumulate=3")
    for part, whole in zip(parts, gradients("trainer.batch_size=6"), strict=True):
        torch.testing.assert_close(part, whole)


def test_validation_leaves_no_tensors_that_training_cannot_use(plan_of, tmp_path):
    # A mixer may keep what it computes, such as tables of sines.
    plan, kept = plan_of("trainer.log_every=1"), []
    real = plan.task.metrics
    plan.task.metrics = lambda logits, labels: kept.append(logits) or real(logits, labels)
    module.train(plan, Tracker(tmp_path / "run", Description("x", {}, plan.config, {}, "")), lambda line: None)
    assert kept and not any(logits.is_inference() or logits.requires_grad for logits in kept)


def test_batches_are_the_rows_in_order_and_rates_those_of_the_schedule(plan_of, fit):
    plan = plan_of("optimizer.warmup=0.5", "optimizer.lr=0.1", "trainer.accumulate=2")
    watch = Watch()
    trainer, _, _ = fit(plan, watch)
    data = plan.task.train_dataset(plan.settings.seed, 32)
    assert trainer.global_step == 4
    assert torch.equal(torch.cat(watch.batches), torch.stack([data[i]["tokens"] for i in range(32)]))
    assert watch.rates == pytest.approx([0.05, 0.1, 0.05, 0.0])


def test_only_labelled_positions_reach_the_head(plan_of):
    plan = plan_of()
    training = Training(plan.model(), plan)
    batch = collate([plan.task.train_dataset(0, 3)[i] for i in range(3)])
    batch = training.on_before_batch_transfer(batch, 0)
    scored = batch["labels"] != NOT_SCORED
    torch.testing.assert_close(training.labelled(batch), training.net.hidden(batch["tokens"])[scored])
    assert torch.equal(batch["targets"], batch["labels"][scored])


def test_a_position_with_several_labels_reaches_the_head_once_for_each(plan_of):
    plan = plan_of()
    training = Training(plan.model(), plan)
    tokens = torch.randint(32, (2, 3))
    labels = torch.full((2, 3, 2), NOT_SCORED)
    labels[0, 1], labels[1, 2, 1] = torch.tensor([5, 6]), 7
    batch = training.on_before_batch_transfer({"tokens": tokens, "labels": labels}, 0)
    whole = training.net(tokens)
    assert batch["targets"].tolist() == [5, 6, 7]
    found = training.net.logits(training.labelled(batch))
    torch.testing.assert_close(found, torch.stack([whole[0, 1], whole[0, 1], whole[1, 2]]))


def test_training_and_evaluation_of_a_large_vocabulary_never_hold_all_logits(plan_of, monkeypatch):
    monkeypatch.setattr(loss, "TOKENS", 3)
    monkeypatch.setattr(loss, "LOGITS", 1)
    plan = plan_of("task.kv=[2,4]")
    training, sizes = Training(plan.model(), plan), []
    batch = training.on_before_batch_transfer(collate([plan.task.train_dataset(0, 5)[i] for i in range(5)]), 0)
    whole = plan.task.scores()
    whole.add(training.net(batch["tokens"]), batch["labels"])
    training.net.head.register_forward_hook(lambda layer, inputs, output: sizes.append(len(output)))
    training.eval()
    training.scores = [plan.task.scores()]
    training.validation_step(batch, 0)
    assert sum(sizes) == len(batch["targets"]) > 6 and max(sizes) == 3
    assert training.scores[0].result() == pytest.approx(whole.result())
    assert training.training_step(batch, 0).item() == pytest.approx(whole.result()["loss"])


def test_packed_rows_count_their_real_tokens_and_keep_documents_apart(plan_of):
    plan = plan_of()
    training = Training(plan.model(), plan)
    tokens = torch.randint(32, (2, 6))
    labels = torch.full((2, 6), NOT_SCORED)
    labels[:, 4] = 3
    documents = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    batch = training.on_before_batch_transfer({"tokens": tokens, "labels": labels, "documents": documents}, 0)
    assert batch["real"] == 11
    alone = training.net(tokens[:1, 2:5])[0, -1]
    torch.testing.assert_close(training.net.logits(training.labelled(batch))[0], alone)


def test_values_and_points_of_a_whole_run(plan_of, train, read_events):
    values, tracker, lines = train(plan_of())
    events = read_events(tracker.folder)
    names = [(event["step"], event["tokens"], sorted(event["metrics"])) for event in events]
    assert names[0][:2] == (0, 0) and all(name.startswith("complexity/") for name in names[0][2])
    # A step is 4 rows of 16 tokens.
    assert names[1:5] == [(2, 128, ["train/loss"]), (2, 128, ["val/accuracy", "val/loss"]),
                          (4, 256, ["train/loss"]), (4, 256, ["val/accuracy", "val/loss"])]
    assert len(names) == 6 and names[5][:2] == (4, 256)
    assert {"eval/kv2/accuracy", "eval/kv2/loss", "eval/kv4/accuracy", "eval/kv4/loss"} <= set(names[5][2])
    assert {"measured/train_tokens_per_second", "measured/peak_memory_bytes"} <= set(names[5][2])
    assert {name: value for event in events for name, value in event["metrics"].items()} == pytest.approx(values)
    assert lines == [line for line in lines if line.startswith(("step 2/4", "step 4/4"))]


def test_costs_are_logged_at_every_length_of_the_task(plan_of, train, read_events):
    plan = plan_of("stack=window", "+model.mixers.window.window=24", "task.test_kv=[4]", "task.test_length=[16,20,64]",
                   "trainer.steps=1")
    values, tracker, _ = train(plan)
    model = plan.config["model"]
    # A layer: a float32 key and value of each token within the window, the new one included; a query and an output.
    expected = {f"complexity/decode_attention_bytes_at_{length}":
                model["n_layers"] * 4 * model["d_model"] * (2 * min(24, length + 1) + 2) for length in (16, 20, 64)}
    assert {name: values.get(name) for name in expected} == expected
    assert all(event["step"] == 0 for event in read_events(tracker.folder) if set(expected) & set(event["metrics"]))
    names = {name.rpartition("_at_")[0] for name in values if name.startswith("complexity/") and "_at_" in name}
    assert len(names) > 5 and all(f"{name}_at_{length}" in values for name in names for length in (16, 20, 64))


def test_validation_is_over_the_tokens_of_all_suites_whatever_the_batches(plan_of, train):
    # Case C19: rows of 1 and of 4 labels.
    def scores(rows):
        plan = plan_of("task.kv=[1,4]", f"trainer.batch_size={rows}", "trainer.steps=1", "optimizer.lr=1e-30")
        return {name: value for name, value in train(plan)[0].items() if name.startswith(("val/", "eval/"))}

    assert scores(1) == pytest.approx(scores(8), rel=1e-5)


def test_the_last_step_is_validated_once_whatever_the_interval(plan_of, train, read_events):
    _, tracker, _ = train(plan_of("trainer.validate_every=3", "trainer.log_every=3"))
    events = read_events(tracker.folder)
    assert [e["step"] for e in events if "val/loss" in e["metrics"]] == [3, 4]
    assert [e["step"] for e in events if "train/loss" in e["metrics"]] == [3, 4]


def test_checkpoints_load_weights_only_and_hold_the_trained_model(plan_of, train):
    # Case C29.
    often = ("trainer.validate_every=3", "trainer.checkpoint_every=2")
    plan = plan_of(*often, "optimizer.betas=[0.8,0.9]", "trainer.patience=5")
    _, tracker, _ = train(plan)
    assert sorted(path.name for path in tracker.record.checkpoints.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    for path in tracker.record.checkpoints.iterdir():
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["config"] == plan.config
    assert checkpoint["tokens"] == 64 * checkpoint["global_step"]
    model = plan.model()
    before = model.embedding.weight.clone()
    last = torch.load(tracker.record.checkpoints / "step=4.ckpt", weights_only=True)
    model.load_state_dict({name.removeprefix("net."): value for name, value in last["state_dict"].items()})
    assert not torch.equal(model.embedding.weight, before)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_stored_nowhere(plan_of, tmp_path, read_events):
    plan = plan_of("trainer.steps=40", "trainer.log_every=10", "trainer.validate_every=100", "optimizer.lr=1e30")
    tracker = Tracker(tmp_path / "run", Description("x", {}, plan.config, {}, ""))
    with pytest.raises(Diverged, match=r"the training loss was not finite at step \d$"):
        module.train(plan, tracker, lambda line: None)
    stored = [value for event in read_events(tracker.folder) for value in event["metrics"].values()]
    assert stored and all(map(math.isfinite, stored))


def test_the_step_that_diverged_is_counted_in_optimiser_steps(plan_of, tmp_path):
    plan = plan_of("trainer.accumulate=2")
    recorder = Recorder(plan, Tracker(tmp_path, Description("x", {}, {}, {}, "")), lambda line: None)
    training = Training(plan.model(), plan)
    # Batches of the steps 11, 11, 12, 12, 13, 13: the first bad one belongs to step 12.
    training.window = [(torch.tensor(value), 1) for value in (1.0, 1.0, 1.0, math.inf, math.nan, 1.0)]
    with pytest.raises(Diverged, match="at step 12"):
        recorder.point(13, training)


class Validations:
    """What EarlyStop sees of a trainer, a given metric at every validation."""

    def __init__(self, plan, values):
        self.should_stop, self.global_step, self.max_steps = False, 1, 100
        self.state = type("State", (), {"fn": "fit"})
        self.lines = []
        recorder = type("Recorder", (), {"values": {}, "say": self.lines.append})
        stop = EarlyStop(plan, recorder)
        self.seen = 0
        for value in values:
            recorder.values[plan.trainer.monitor] = value
            stop.on_validation_end(self, None)
            self.seen += 1
            if self.should_stop:
                break


@pytest.mark.parametrize(
    ("options", "values", "seen"),
    [
        (["trainer.monitor=val/accuracy", "trainer.target=1.0"], [0.5, 0.99999, 1.0, 1.0], 3),
        (["trainer.target=0.5"], [0.9, 0.51, 0.5, 0.4], 3),
        (["trainer.patience=2"], [1.0, 0.9, 0.95, 0.9, 0.1], 4),
        (["trainer.monitor=val/accuracy", "trainer.patience=1"], [0.1, 0.2, 0.2, 0.9], 3),
        (["trainer.patience=3"], [1.0, 1.1, 1.2, 0.9, 1.0, 1.0], None),
    ],
)
def test_early_stop_by_hand(plan_of, options, values, seen):
    validations = Validations(plan_of(*options), values)
    assert (validations.seen if validations.should_stop else None) == seen
    assert len(validations.lines) == int(validations.should_stop)


def test_a_run_stops_at_its_target_and_is_tested(plan_of, train):
    values, tracker, lines = train(plan_of("trainer.steps=40", "trainer.target=100"))
    assert "stopped early: val/loss" in lines[1] and len(lines) == 2
    assert "eval/kv2/accuracy" in values
    assert [path.name for path in tracker.record.checkpoints.iterdir()] == ["step=2.ckpt"]


def test_a_monitor_that_the_task_does_not_measure_is_named(plan_of, train):
    message = "monitor='val/bits_per_byte' is no metric of this task; it has val/loss, val/accuracy"
    with pytest.raises(ValueError, match=message):
        train(plan_of("trainer.monitor=val/bits_per_byte", "trainer.patience=1"))


def test_compile_compiles_the_inner_function_alone(plan_of, fit, monkeypatch):
    compiled, called = [], []

    def compile(function):
        compiled.append(function)
        return lambda *arguments: called.append(1) or function(*arguments)

    monkeypatch.setattr(torch, "compile", compile)
    _, training, _ = fit(plan_of("trainer.compile=true"))
    assert compiled == [training.read] and len(called) == 4
    assert all(name.startswith("net.") and "_orig_mod" not in name for name in training.state_dict())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), (64, torch.float64)])
def test_precision_reaches_the_model_and_clipping_still_works(plan_of, fit, precision, dtype):
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer, training):
            linear = next(layer for layer in training.net.stack.modules() if isinstance(layer, torch.nn.Linear))
            linear.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))

    _, training, recorder = fit(plan_of(f"trainer.precision={precision}", "optimizer.clip=0.5"), Look())
    assert set(seen) == {dtype}
    assert math.isfinite(recorder.values["train/loss"])
    assert {p.dtype for p in training.parameters()} == {torch.float64 if precision == 64 else torch.float32}


def test_lightning_says_nothing(plan_of, train, capfd):
    train(plan_of())
    assert capfd.readouterr() == ("", "")


def test_the_clock_leaves_out_first_steps_and_validation(plan_of, fit):
    plan = plan_of("trainer.steps=30")
    _, training, recorder = fit(plan)
    assert recorder.warming == 3
    expected = (30 - 3) * 64 / recorder.clock.seconds
    assert recorder.measured(training)["measured/train_tokens_per_second"] == pytest.approx(expected)


def test_one_step_is_too_few_for_a_throughput(plan_of, train):
    values, _, _ = train(plan_of("trainer.steps=1"))
    assert "measured/train_tokens_per_second" not in values


def test_lightning_is_not_misled_by_a_slurm_job(plan_of, fit, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "sweep")
    trainer, _, _ = fit(plan_of())
    assert (trainer.world_size, trainer.global_step) == (1, 4)
    assert isinstance(trainer, L.Trainer)
