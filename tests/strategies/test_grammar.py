"""Strategies as text: what is read, that text and value agree, and sweeps."""

# Types stand here as they are, not as text, because those of classes inside a function could not be resolved.

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import StrategyError
from offbeat.strategies import (
    DDP,
    Accumulate,
    AllReduce,
    Axis,
    Setting,
    Single,
    Strategy,
    combined,
    expand,
    parse,
)


class Order(StrEnum):
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class Nesterov(Setting):
    rate: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class SSP(Setting):
    staleness: int


@dataclass(frozen=True)
class BSP(Setting):
    pass


@dataclass(frozen=True)
class Within(Setting):
    """A setting with a setting inside."""

    inner: SSP | Nesterov = field(default_factory=Nesterov)
    often: int | None = None


def _registry() -> dict[str, Any]:
    """Classes inside a function are written by their names alone, as those of a registry are."""

    @dataclass(frozen=True)
    class Server(Strategy):
        shards: int = 1
        consistency: BSP | SSP | Within = BSP()
        order: Order | None = None
        seed: int | None = field(default=None, kw_only=True)
        axis = Axis.EXCHANGE
        aliases: ClassVar = {
            "bosen": "server(consistency=ssp(3))",
            "shop": "server",
            "kiosk": "shop",
            "fed": "bosen + local(8)",
            "loop": "loop + local(8)",
            "chicken": "egg",
            "egg": "chicken",
        }

    @dataclass(frozen=True)
    class Ring(Strategy):
        algorithm: Literal["ring", "tree", 2] | BSP = "ring"
        overlap: bool = True
        rate: float = 0.5
        axis = Axis.EXCHANGE

    @dataclass(frozen=True)
    class Local(Strategy):
        steps: int
        outer: Nesterov | Literal["average"] = "average"
        warmup: Optional[float] = None  # noqa: UP045
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class TopK(Strategy):
        share: float
        error: bool | int = False
        axis = Axis.COMPRESSION

    return {cls.name: cls for cls in (Server, Ring, Local, TopK)}


REGISTRY = _registry()
Server, Ring, Local, TopK = REGISTRY.values()


# --- what is read


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("ddp", DDP()),
        ("ddp()", DDP()),
        ("  ddp \n + accumulate ( 2 )  ", DDP() + Accumulate(2)),
        ("(accumulate(2) + ddp)", DDP() + Accumulate(2)),
        ("ddp(50)", DDP(50.0)),
        ("ddp(bucket=1e-3, find_unused=True)", DDP(0.001, True)),
        ("ddp(find_unused=True, bucket=50)", DDP(50.0, True)),
        ("ddp(bucket=0x10)", DDP(16.0)),
        ("accumulate(1_000)", Accumulate(1000)),
        ("accumulate(2)", AllReduce() + Accumulate(2)),
        ("sequential", Single()),
        ("sequential()", Single()),
        ("gradient_accumulation(4)", Accumulate(4)),
        ("gradient_accumulation(steps=4) + ddp", DDP() + Accumulate(4)),
    ],
)
def test_a_text_means_its_strategy(text: str, strategy: Strategy) -> None:
    assert parse(text) == strategy
    assert expand(text) == [strategy]


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("ring(tree)", Ring("tree")),
        ("ring(2)", Ring(2)),
        ("ring(bsp)", Ring(BSP())),
        ("ring(overlap=False, rate=-0.25)", Ring("ring", False, -0.25)),
        ("server(2, ssp(3))", Server(2, SSP(3))),
        ("server(consistency=bsp())", Server()),
        ("server(order=last, seed=None)", Server(order=Order.LAST)),
        ("server(consistency=within(ssp(1), often=-2))", Server(1, Within(SSP(1), -2))),
        ("local(8, outer=nesterov(0.7, 0.5))", Local(8, Nesterov(0.7, 0.5))),
        ("local(8, nesterov)", Local(8, Nesterov())),
        ("local(8, average, 3)", Local(8, "average", 3.0)),
        ("topk(1, True)", TopK(1.0, True)),
        ("kiosk(2)", Server(2)),
        ("bosen", Server(consistency=SSP(3))),
        ("fed + topk(0.1)", Server(consistency=SSP(3)) + Local(8) + TopK(0.1)),
    ],
)
def test_arguments_are_read_by_the_types_of_their_fields(text: str, strategy: Strategy) -> None:
    assert parse(text, REGISTRY) == strategy


def test_a_number_is_kept_as_its_field_says() -> None:
    made: Any = parse("ddp(50)")
    assert type(made.bucket) is float
    assert str(made) == "ddp(bucket=50.0)"


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (DDP(), "ddp"),
        (DDP(find_unused=True), "ddp(find_unused=True)"),
        (Accumulate(4) + DDP(), "ddp + accumulate(4)"),
        (combined(Accumulate(4)), "allreduce + accumulate(4)"),
        (Ring("tree"), "ring(tree)"),
        (Ring(BSP(), False), "ring(bsp, overlap=False)"),
        (Server(2, SSP(3)), "server(shards=2, consistency=ssp(3))"),
        (Server(order=Order.LAST, seed=3), "server(order=last, seed=3)"),
        (Local(8, Nesterov(0.7, 0.5)), "local(8, outer=nesterov(momentum=0.5))"),
        (Local(8, warmup=1e-5), "local(8, warmup=1e-05)"),
        (TopK(0.01, True), "topk(0.01, error=True)"),
    ],
)
def test_the_text_of_a_strategy_has_what_differs_from_the_defaults(strategy: Strategy, text: str) -> None:
    assert str(strategy) == text


# --- text and value agree

numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
nesterovs = st.builds(Nesterov, floats, floats)
ssps = st.builds(SSP, numbers)
withins = st.builds(Within, ssps | nesterovs, st.none() | numbers)
servers = st.builds(
    Server,
    numbers,
    st.just(BSP()) | ssps | withins,
    st.none() | st.sampled_from(Order),
    seed=st.none() | numbers,
)
rings = st.builds(Ring, st.sampled_from(["ring", "tree", 2, BSP()]), st.booleans(), floats)
locals_ = st.builds(Local, numbers, nesterovs | st.just("average"), st.none() | floats)
topks = st.builds(TopK, floats, st.booleans() | numbers)
single_parts = servers | rings | locals_ | topks


@st.composite
def sums(draw: st.DrawFn) -> Strategy:
    parts: list[Strategy] = [draw(servers | rings), *draw(st.lists(topks, max_size=3))]
    if draw(st.booleans()):
        parts.append(draw(locals_))
    first, *others = draw(st.permutations(parts))
    for part in others:
        first = first + part
    return first


@given(single_parts | sums())
def test_a_strategy_is_read_back_from_its_text(strategy: Strategy) -> None:
    again = parse(str(strategy), REGISTRY)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert str(again) == str(strategy)


@given(st.floats(0, 2**30, exclude_min=True), st.booleans(), st.integers(1, 2**63 - 1))
def test_the_built_in_strategies_are_read_back_from_their_text(bucket: float, unused: bool, steps: int) -> None:
    for exchange in (Single(), DDP(bucket, unused), AllReduce(bucket=bucket)):
        for strategy in (exchange, combined(exchange), exchange + Accumulate(steps), combined(Accumulate(steps))):
            assert parse(str(strategy)) == strategy


def test_a_long_sum_of_compressions_is_read() -> None:
    assert len(parse("+".join(["topk(0.1)"] * 300), REGISTRY).parts()) == 301


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server(consistency=sps(3))", "bsp | ssp(staleness: int) | within(inner: "),
        ("server(consistency=sps(3))", "not sps(...). Did you mean 'ssp'?"),
        ("server(consistency=ssp)", "ssp needs staleness: ssp(staleness: int)"),
        ("server(consistency=ssp(2.5))", "ssp: staleness takes int, not 2.5"),
        ("server(consistency=bsp(1))", "Too many arguments: bsp."),
        ("server(1, bsp, first, 4)", "Too many arguments"),
        ("server(order=middle)", "order takes first | last | None, not middle"),
        ("ring(3)", "algorithm takes ring | tree | 2 | bsp, not 3"),
        ("bosen(2)", "'bosen' stands for `server(consistency=ssp(3))` and takes no arguments"),
        ("loop", "The alias 'loop' means itself"),
        ("egg", "The alias 'egg' means itself"),
        ("ddp", "Unknown strategy 'ddp'."),
        ("local(server)", "steps takes int, not server"),
    ],
)
def test_a_refusal_of_arguments_names_the_valid_ones(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        parse(text, REGISTRY)
    assert message in str(refusal.value)


def test_the_carets_stand_under_the_piece_of_a_long_text_too() -> None:
    with pytest.raises(StrategyError) as refusal:
        parse(" + ".join(["topk(0.1)"] * 50 + ["topk('x')"] + ["topk(0.1)"] * 50), REGISTRY)
    *_, shown, carets = str(refusal.value).splitlines()
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "'x'"
    assert len(shown) < 120


# --- sweeps


def test_a_set_means_one_strategy_for_each_value() -> None:
    assert expand("accumulate({4,16})") == [Accumulate(4), Accumulate(16)]


def test_several_sets_mean_all_choices_the_last_varying_fastest() -> None:
    assert expand("accumulate({4,16}) + ddp(bucket={1,2})") == [
        Accumulate(4) + DDP(1),
        Accumulate(4) + DDP(2),
        Accumulate(16) + DDP(1),
        Accumulate(16) + DDP(2),
    ]


def test_a_set_may_hold_whatever_its_argument_may_be() -> None:
    assert expand("server(consistency={bsp, ssp(1)})", REGISTRY) == [
        Server(),
        Server(consistency=SSP(1)),
    ]
    assert expand("server(consistency=within(ssp({1,-2}), {None,3}))", REGISTRY) == [
        Server(1, Within(SSP(staleness), often)) for staleness in (1, -2) for often in (None, 3)
    ]


def test_what_a_sweep_means_twice_is_listed_once() -> None:
    assert expand("ddp({2, 2.0, 4})") == [DDP(2), DDP(4)]


def test_one_wrong_value_of_a_sweep_is_pointed_at() -> None:
    with pytest.raises(StrategyError, match=r"(?s)steps takes int, not 2\.5.*at character 15 "):
        expand("accumulate({4,2.5})")


def test_sets_inside_sets_and_huge_sweeps_are_refused() -> None:
    with pytest.raises(StrategyError, match="a set inside a set"):
        expand("accumulate({1,{2,3}})")
    with pytest.raises(StrategyError, match="means 1,024 strategies; 1,000 are allowed"):
        expand(" + ".join(["topk({1,2})"] * 10), REGISTRY)


def test_an_alias_that_means_a_sweep_is_refused() -> None:
    @dataclass(frozen=True)
    class Sweeping(Strategy):
        steps: int
        axis = Axis.WHEN
        aliases: ClassVar = {"both": "sweeping({1,2})"}

    with pytest.raises(StrategyError, match="Sweeps belong to"):
        expand("both", {"sweeping": Sweeping})
