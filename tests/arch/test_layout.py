"""The layout grammar against hand-worked stacks, a generator of random layouts and every fault it names."""

from __future__ import annotations

import pickle
import random
import re

import pytest

from arch.layout import MOST_LAYERS, Layer, LayoutError, describe, layers

KNOWN = ("mha", "gqa", "window", "linear", "mamba2")


def read(text: str, n_layers: int | None = None) -> list[str]:
    return [str(layer) for layer in layers(text, n_layers)]


def placed(n_layers: int, rest: str, **indices: list[int]) -> list[str]:
    """`rest` everywhere but at the indices listed for a name."""
    at = {index: name for name, places in indices.items() for index in places}
    return [at.get(index, rest) for index in range(n_layers)]


def spelled(pattern: str) -> list[str]:
    """A published pattern of one letter a sublayer."""
    return [{"M": "mamba2", "-": "mlp", "*": "gqa"}[letter] for letter in pattern]


ZAMBA2 = placed(
    63,
    "mamba2",
    # Before Mamba layers 6 12 18 24 30 36 42 47 51 of 54, alternating: each earlier insertion moves the next by one.
    **{"gqa@a": [6, 20, 34, 48, 59], "gqa@b": [13, 27, 41, 54]},
)
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
MEGATRON_8B = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"

PUBLISHED = {
    "jamba": ("4*mamba + gqa + 3*mamba", 32, ["gqa" if i % 8 == 4 else "mamba" for i in range(32)]),
    "samba": ("mamba + window", 24, ["window" if i % 2 else "mamba" for i in range(24)]),
    "zamba2": ("mamba2 with gqa@a before 6 18 30 42 51 with gqa@b before 12 24 36 47", 63, ZAMBA2),
    "griffin 2b": ("2*recurrent + window", 26, ["window" if i % 3 == 2 else "recurrent" for i in range(26)]),
    "gemma 2": ("local + global", 26, ["global" if i % 2 else "local" for i in range(26)]),
    "gemma 3": ("5*local + global", 26, ["local" if (i + 1) % 6 else "global" for i in range(26)]),
    "llama 4": ("3*chunked + nope", 48, ["chunked" if (i + 1) % 4 else "nope" for i in range(48)]),
    "qwen 3 next": ("3*gated_deltanet + gqa", 48, ["gated_deltanet" if (i + 1) % 4 else "gqa" for i in range(48)]),
    "nemotron-h 8b": ("mamba2 + mlp with gqa at 7 18 29 40", 52, spelled(NEMOTRON_H_8B)),
    "nemotron-h 56b": (
        "mamba2 + mlp with gqa at 7 18 29 40 51 62 73 84 95 106",
        118,
        spelled("M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-"),
    ),
    "megatron 8b": ("mamba2 + mlp with gqa at 10 22 33 45 with mlp at 6 20 35 49", 56, spelled(MEGATRON_8B)),
    "minimax": ("7*linear + gqa", 80, 10 * (7 * ["linear"] + ["gqa"])),
    # The published indices 4 8 .. 24 27 count from 1.
    "kimi linear": ("kda with mla at 3 7 11 15 19 23 26", 27, placed(27, "kda", mla=[3, 7, 11, 15, 19, 23, 26])),
    "falcon h1": ("gqa|mamba2", 36, 36 * ["gqa|mamba2"]),
    "hymba": (
        "local|mamba with global|mamba at 0 15 31",
        32,
        placed(32, "local|mamba", **{"global|mamba": [0, 15, 31]}),
    ),
    "rwkv": ("rwkv6", 3, ["rwkv6", "rwkv6", "rwkv6"]),
    "bert": ("mha", 12, 12 * ["mha"]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_stacks_are_said_exactly(name):
    text, n_layers, expected = PUBLISHED[name]
    assert read(text, n_layers) == expected


@pytest.mark.parametrize(
    ("name", "counts"),
    {
        "zamba2": {"mamba2": 54, "gqa@a": 5, "gqa@b": 4},
        "nemotron-h 8b": {"mamba2": 24, "mlp": 24, "gqa": 4},
        "nemotron-h 56b": {"mamba2": 54, "mlp": 54, "gqa": 10},
        "megatron 8b": {"mamba2": 24, "mlp": 28, "gqa": 4},
    }.items(),
)
def test_published_counts(name, counts):
    text, n_layers, _ = PUBLISHED[name]
    stack = read(text, n_layers)
    assert {layer: stack.count(layer) for layer in set(stack)} == counts


def test_a_layer_holds_its_branches_and_its_share_name():
    stack = layers("gqa|mamba2@a + mlp + mha", 3)
    assert stack == (Layer(("gqa", "mamba2"), "a"), Layer(("mlp",)), Layer(("mha",), None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3*a + b", ["a", "a", "a", "b"]),
        ("2*(2*a + b)", ["a", "a", "b", "a", "a", "b"]),
        ("2*(a + 2*(b + c)) + d", ["a", "b", "c", "b", "c", "a", "b", "c", "b", "c", "d"]),
        ("((a))+(b+c)", ["a", "b", "c"]),
        ("2*a|b@s", ["a|b@s", "a|b@s"]),
        ("3*mlp@s", ["mlp@s", "mlp@s", "mlp@s"]),
        (" \n3 *\ta+b  ", ["a", "a", "a", "b"]),
        ("my.mixer-2_x + Atlas + _w", ["my.mixer-2_x", "Atlas", "_w"]),
    ],
)
def test_one_period(text, expected):
    assert read(text) == expected


def test_the_period_is_cut_where_n_layers_ends():
    assert read("a + b + 2*c", 7) == ["a", "b", "c", "c", "a", "b", "c"]


def test_at_counts_in_the_stack_and_before_in_the_period():
    assert read("a + b with x at 1 3", 6) == ["a", "x", "b", "x", "a", "b"]
    assert read("a + b with x before 1 3", 6) == ["a", "x", "b", "a", "x", "b"]
    assert read("a + b with x before 0 1 with y at 0 5", 7) == ["y", "x", "a", "x", "b", "y", "a"]
    assert read("a with x at 3 1", 4) == ["a", "x", "a", "x"]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("a", 2),
        ("a@s", 2),
        ("a + b", 2),
        ("3*a + b", 4),
        # Inserts: room for all of them and a whole period.
        ("mamba2 + mlp with gqa at 7 18 29 40", 41),
        ("a with x at 0", 2),
        ("3*a + b with x at 1", 5),
        ("a with x before 6 12", 15),
        ("a with x before 6 with y at 1", 9),
        ("a with x at 3 with y at 20", 21),
    ],
)
def test_without_n_layers_the_shortest_whole_stack(text, length):
    assert len(layers(text)) == length
    if "with" in text:
        with pytest.raises(LayoutError, match=f"at least {length} layers are needed"):
            layers(text, length - 1)


# ¦ marks where the caret must stand.
FAULTS = [
    ("¦", None, "expected a mixer, found an empty layout"),
    ("  ¦", None, "an empty layout"),
    ("¦* gqa", None, "expected a mixer, found '*' (a count comes first"),
    ("3 ¦gqa", None, "expected '*' after the count, found 'gqa'"),
    ("2¦(gqa)", None, "expected '*' after the count, found '('"),
    ("3*¦", None, "expected a mixer, found the end"),
    ("gqa + ¦", None, "expected a mixer, found the end"),
    ("gqa ¦*3", None, "a count comes first: 3*gqa"),
    ("gqa + 2.5*gqa".replace(".", "¦."), None, "expected '*' after the count, found '.'"),
    ("3*mha + (gqa + mha¦", None, "expected '+' or ')', found the end"),
    ("(gqa ¦with mha at 1)", None, "expected '+' or ')', found 'with'"),
    ("gqa + mha¦)", None, "expected '+', 'with' or the end, found ')'"),
    ("gqa + (¦)", None, "expected a mixer, found ')'"),
    ("mha + ¦0*gqa", None, "a repeat must be a whole number from 1 to 10,000, got 0"),
    ("¦-2*gqa", None, "got -2"),
    ("¦99999999999*gqa", None, "a repeat must be a whole number from 1 to 10,000"),
    ("mha + ¦200*(3*mha + 60*gqa)", None, "12,600 layers are more than the 10,000 possible"),
    ("¦6000*mha + 6000*gqa", None, "12,000 layers are more than the 10,000 possible"),
    ("gqa ¦mha", None, "expected '+', 'with' or the end, found 'mha'"),
    ("gqa ¦& mha", None, "found '&'"),
    ("gqa¦, mha", None, "a comma has no place in a layout: '+' joins layers"),
    ("mha with gqa at 1¦, 3", None, "spaces separate indices"),
    ("gqa|¦", None, "expected a mixer, found the end"),
    ("gqa|¦|mha", None, "expected a mixer, found '|'"),
    ("(gqa + mha)¦|window", None, "parallel branches are plain names"),
    ("gqa@a¦|mha", None, "a share name comes after the last"),
    ("(gqa)¦@a", None, "a share name belongs to one layer"),
    ("gqa@¦", None, "expected a share name, found the end"),
    ("gqa@¦7", None, "expected a share name, found '7'"),
    ("gqa@¦mlp", None, "a reserved word"),
    ("¦with gqa at 3", None, "expected a mixer, found 'with' (a reserved word"),
    ("gqa ¦at 3", None, "expected '+', 'with' or the end, found 'at' (a reserved word"),
    ("gqa + ¦before", None, "expected a mixer, found 'before'"),
    ("¦gqa|mlp", None, "mlp is a layer of its own"),
    ("gqa + ¦mlp|mlp", None, "mlp is a layer of its own"),
    ("gqa with ¦", None, "expected a mixer, found the end"),
    ("gqa with ¦2*mha at 3", None, "expected a mixer, found '2'"),
    ("gqa with mha ¦3", None, "expected 'at' or 'before', found '3'"),
    ("gqa with mha at ¦", None, "expected an index after 'at', found the end"),
    ("gqa with mha before ¦x", None, "expected an index after 'before', found 'x'"),
    ("gqa with mha at 3 ¦x", None, "expected an index, 'with' or the end, found 'x'"),
    ("gqa with mha at ¦-1", None, "an index must be a whole number from 0"),
    ("gqa with mha at ¦10001", None, "an index must be a whole number from 0 to 10,000"),
    ("gqa with mha at 7 3 ¦7", None, "'at 7' is said twice"),
    ("gqa with mha at 7 with window at ¦07", None, "'at 7' is said twice"),
    ("gqa with mha before 7 with window before ¦7", None, "'before 7' is said twice"),
    ("gqa@a + ¦mha@a", None, "'mha@a' cannot share the weights of 'gqa@a'"),
    ("gqa@a with ¦gqa|mha@a at 3", None, "'gqa|mha@a' cannot share the weights of 'gqa@a'"),
    ("gqa with mha at 3 ¦8", 8, "index 8 is outside the stack of n_layers=8; at least 9 layers are needed"),
    ("gqa with mha before 3 ¦6", 8, "index 6 is outside the 6 layers of the period at n_layers=8; at least 9 layers"),
    ("gqa with mha before ¦0 1", 1, "index 0 is outside the 0 layers of the period at n_layers=1; at least 4 layers"),
    ("2*mha + ¦gqa + mha + gqa", 2, "'gqa' does not appear at n_layers=2; at least 3 layers are needed"),
    ("3*mha + ¦gqa", 3, "'gqa' does not appear at n_layers=3; at least 4 layers are needed"),
    ("2*(mha + gqa) + ¦mha@a + gqa", 4, "'mha@a' does not appear at n_layers=4; at least 5 layers are needed"),
    ("3*mha + ¦gqa with window at 0", 4, "'gqa' does not appear at n_layers=4; at least 5 layers are needed"),
    ("¦gqa with window at 0 1", 2, "'gqa' does not appear at n_layers=2; at least 3 layers are needed"),
    ("gqa + ¦windw", None, "unknown mixer 'windw' (did you mean 'window'?); known are gqa, linear, mamba2, mha, win"),
    ("gqa with ¦zzz at 3", None, "unknown mixer 'zzz'; known are gqa, linear, mamba2, mha, window"),
    ("¦gqa with mha before 10000", None, "10,002 layers are more than the 10,000 possible"),
    (50 * "(" + "¦(gqa", None, "more than 50 parentheses"),
]


@pytest.mark.parametrize(("marked", "n_layers", "message"), FAULTS)
def test_every_fault_is_named_with_a_caret_under_it(marked, n_layers, message):
    text, position = marked.replace("¦", ""), marked.index("¦")
    with pytest.raises(LayoutError) as fault:
        layers(text, n_layers, KNOWN)
    said, shown, caret = str(fault.value).split("\n")
    assert message in said
    assert shown == "  " + text
    assert caret == "  " + position * " " + "^"


def test_a_long_layout_is_shown_around_the_fault_and_line_breaks_as_spaces():
    with pytest.raises(LayoutError) as fault:
        layers(100 * "gqa +\n" + "% + gqa" + 100 * " + gqa")
    _, shown, caret = str(fault.value).split("\n")
    assert len(shown) < 130
    assert shown[caret.index("^")] == "%"


def test_a_number_of_thousands_of_digits_is_a_layout_error():
    with pytest.raises(LayoutError, match="a repeat must be"):
        layers(5000 * "9" + "*gqa")


@pytest.mark.parametrize("n_layers", [0, -1, True, 2.0, "4", MOST_LAYERS + 1])
def test_n_layers_must_be_a_count(n_layers):
    with pytest.raises(LayoutError, match=r"n_layers=.* must be a whole number from 1 to 10,000 \(layout: gqa\)"):
        layers("gqa", n_layers)


@pytest.mark.parametrize("text", [None, 3, ["gqa"]])
def test_a_layout_must_be_a_string(text):
    with pytest.raises(LayoutError, match="must be a string"):
        layers(text)


def test_mlp_needs_no_registration():
    assert read("gqa + mlp") == [str(layer) for layer in layers("gqa + mlp", known=KNOWN)]


def test_errors_survive_the_way_back_from_a_worker_process():
    with pytest.raises(LayoutError) as fault:
        layers("gqa +")
    assert str(pickle.loads(pickle.dumps(fault.value))) == str(fault.value)


def test_only_parentheses_inside_each_other_are_limited():
    assert len(layers(" + ".join(100 * ["(gqa)"]))) == 100


def test_indices_up_to_the_limit_are_filled():
    assert len(layers(f"gqa with mha before {MOST_LAYERS - 2}")) == MOST_LAYERS
    assert len(layers(f"gqa with mha at {MOST_LAYERS - 1}")) == MOST_LAYERS


def draw_layer(rng: random.Random) -> str:
    """A layer whose share name says its content, so that no two contents share one."""
    branches = [rng.choice(KNOWN) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    layer = "mlp" if rng.random() < 0.15 else "|".join(branches)
    return layer + ("@s_" + layer.replace("|", ".") if rng.random() < 0.2 else "")


def draw_pattern(rng: random.Random, depth: int) -> tuple[str, list[str]]:
    """A random pattern and, worked out on the way, its period."""
    texts, period = [], []
    for _ in range(rng.randint(1, 3)):
        grouped = depth > 0 and rng.random() < 0.4
        text, block = draw_pattern(rng, depth - 1) if grouped else (None, [draw_layer(rng)])
        count = rng.randint(1, 4)
        texts.append((f"{count}*" if count > 1 else "") + (f"({text})" if grouped else block[0]))
        period += count * block
    return "+".join(texts), period


def draw_layout(rng: random.Random) -> tuple[str, int, list[str]]:
    """A random layout, a length and the stack, built by list.insert, the lowest final index first."""
    text, period = draw_pattern(rng, depth=3)
    filled = rng.randint(len(period), 3 * len(period) + 2)
    stack = [period[index % len(period)] for index in range(filled)]
    before = rng.sample(range(filled), rng.randint(0, min(3, filled)))
    names = {index: draw_layer(rng) for index in before}
    for index in sorted(before, reverse=True):
        stack.insert(index, names[index])
    at = {}
    for index in sorted(rng.sample(range(len(stack) + 3), rng.randint(0, 3))):
        if index <= len(stack):
            at[index] = draw_layer(rng)
            stack.insert(index, at[index])
    clauses = [f" with {name} before {index}" for index, name in names.items()]
    clauses += [f" with {name} at {index}" for index, name in at.items()]
    rng.shuffle(clauses)
    return text + "".join(clauses), len(stack), stack


def spaced(rng: random.Random, text: str) -> str:
    """White space around every sign."""
    return re.sub(r"[*+|@()]", lambda sign: rng.choice(["", " ", "\n", "\t "]) + sign[0] + rng.choice(["", "  "]), text)


@pytest.mark.parametrize("seed", range(300))
def test_random_layouts_are_read_as_they_were_built(seed):
    rng = random.Random(seed)
    text, n_layers, stack = draw_layout(rng)
    assert read(spaced(rng, text), n_layers) == stack


@pytest.mark.parametrize("seed", range(300))
def test_describe_is_read_back_as_the_same_stack(seed):
    text, n_layers, _ = draw_layout(random.Random(seed))
    stack = layers(text, n_layers)
    assert layers(describe(stack), len(stack)) == stack
    assert len(stack) == 1 or layers(describe(stack)) == stack
    assert len(describe(stack)) <= len(" + ".join(map(str, stack)))


@pytest.mark.parametrize(
    ("text", "n_layers", "short"),
    [
        ("gqa", 1, "gqa"),
        ("gqa", 12, "12*gqa"),
        ("7*linear + gqa", 80, "10*(7*linear + gqa)"),
        ("5*local + global", 26, "4*(5*local + global) + 2*local"),
        ("gqa|mamba2@a", 4, "4*gqa|mamba2@a"),
        ("2*(2*a + b) + c", 14, "2*(2*(2*a + b) + c)"),
        ("a with b at 0 3", 4, "b + 2*a + b"),
    ],
)
def test_describe_finds_the_repeats(text, n_layers, short):
    assert describe(layers(text, n_layers)) == short
