"""Small schedules on two clocks, with constants that make the seconds easy to count.

A product of the texts takes 4 s; a gather of 3 of 4 shards takes 3 s.
"""

import dataclasses

import pytest

from optfn.distributed import Chip, estimate_step

CHIP = Chip("toy", flops=4.0, hbm=1e30, link=1.0, links=1, latency=0.0)
HEAD = "HloModule toy, is_scheduled=true, num_partitions=4\n\n"
GATHER = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
PRODUCT = "dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={0}"


def program(*lines, before=""):
    """Return the text of a program: a: f16[2,2] makes products of 16 FLOPs, s: s8[1] is a shard."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{HEAD}{before}
ENTRY %main () -> () {{
  %a = f16[2,2] parameter(0)
  %s = s8[1] parameter(1)
{body}
}}
"""


def estimate(*lines, before="", chip=CHIP):
    found = estimate_step(program(*lines, before=before), chip)
    assert found.seconds == pytest.approx(found.compute + sum(found.exposed.values()))
    return found


def seconds(*lines, before="", chip=CHIP):
    """Return (step, exposed)."""
    found = estimate(*lines, before=before, chip=chip)
    return found.seconds, sum(found.exposed.values())


def product(name):
    return f"%{name} = f16[2,2] {PRODUCT}"


def start(name):
    return f"%{name} = (s8[1], s8[4]) all-gather-start(%s), {GATHER}"


def done(name, of):
    return f"%{name} = s8[4] all-gather-done(%{of})"


def test_a_synchronous_collective_stops_compute():
    assert seconds(product("p"), f"%g = s8[4] all-gather(%s), {GATHER}") == (7, 3)


def test_an_asynchronous_collective_is_exposed_for_what_is_left_at_its_end():
    assert seconds(start("g"), product("p"), done("d", "g")) == (4, 0)
    assert seconds(product("p"), start("g"), done("d", "g")) == (7, 3)
    assert seconds(start("g"), done("d", "g"), product("p")) == (7, 3)


def test_collectives_share_the_links_in_the_order_of_their_starts():
    two = (start("g"), start("h"), product("p"))
    assert seconds(*two, done("d", "g"), done("e", "h")) == (6, 2)
    assert seconds(*two, done("e", "h"), done("d", "g")) == (6, 2)
    found = estimate(start("g"), start("h"), done("e", "h"), product("p"), done("d", "g"))
    assert (found.seconds, found.exposed["all-gather"]) == (10, 6)


def test_what_is_never_awaited_is_awaited_at_the_end():
    assert seconds(start("g")) == (3, 3)


def test_a_start_that_the_compiler_calls_synchronous_stops_compute():
    is_sync = start("g") + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert seconds(is_sync, product("p"), done("d", "g")) == (7, 3)


def test_kinds_are_counted():
    found = estimate(
        start("g"),
        done("d", "g"),
        "%r = s8[4] all-reduce(%d), replica_groups={}, to_apply=%add",
        "%c = s8[1] reduce-scatter(%d), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add",
        "%t = s8[4] all-to-all(%d), replica_groups=[1,4]<=[4], dimensions={0}",
        "%m = s8[4] collective-permute(%d), source_target_pairs={{0,1},{1,0}}",
    )
    assert found.sent == {
        "all-gather": 3,
        "all-reduce": 6,
        "reduce-scatter": 3,
        "all-to-all": 3,
        "collective-permute": 4,
    }
    assert found.communication == found.sent  # a byte a second
    assert set(found.count.values()) == {1} and sum(found.asynchronous.values()) == 1


def test_compute_takes_the_time_of_its_bytes_or_of_its_flops():
    slow = dataclasses.replace(CHIP, hbm=2.0)
    assert seconds(product("p"), chip=slow)[0] == 12  # 3 · 8 bytes
    assert seconds("%n = f16[2,2] negate(%a)", chip=slow)[0] == 8
    assert seconds(product("p"), chip=dataclasses.replace(CHIP, efficiency=0.5))[0] == 8


def test_products_of_more_bits_take_longer():
    wide = "%w = f32[2,2] convert(%a)"
    assert seconds(wide, f"%p = f32[2,2] {PRODUCT.replace('%a', '%w')}")[0] == pytest.approx(8)


REDUCE = """
%add (x: s8[], y: s8[]) -> s8[] {
  %x = s8[] parameter(0)
  %y = s8[] parameter(1)
  ROOT %z = s8[] add(%x, %y)
}

%scattered (x: s8[4]) -> s8[1] {
  %x = s8[4] parameter(0)
  ROOT %r = s8[1] reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""


@pytest.mark.parametrize("form", ["async", "call", "fusion"])
def test_a_start_around_a_collective(form):
    found = estimate(
        "%x = s8[4] parameter(2)",
        f"%g = ((s8[4]), s8[1]) {form}-start(%x), calls=%scattered",
        product("p"),
        f"%u = ((s8[4]), s8[1]) {form}-update(%g)",
        f"%d = s8[1] {form}-done(%u)",
        before=REDUCE,
    )
    assert (found.seconds, found.exposed, found.sent) == (
        4,
        {"reduce-scatter": 0},
        {"reduce-scatter": 3},
    )


def test_a_start_around_other_work_counts_as_compute():
    inner = f"%inner () -> f16[2,2] {{\n  %a = f16[2,2] parameter(0)\n  ROOT {product('p')}\n}}\n"
    for form in ("call", "fusion"):
        start = f"%g = ((f16[2,2]), f16[2,2]) {form}-start(%a), calls=%inner"
        assert seconds(start, f"%d = f16[2,2] {form}-done(%g)", before=inner) == (4, 0)


SPARSE = """
%called (x: s8[1]) -> s8[4] {
  %x = s8[1] parameter(0)
  ROOT %g = s8[4] all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"
"""


def test_a_sparse_core_sends_off_at_the_update():
    start = '%g = ((), (), s32[1]) custom-call-start(), custom_call_target="c", called_computations={%called}'  # noqa: E501
    update = "%u = ((s8[1]), s8[4], s32[1]) custom-call-update(%g, %s)"
    done = "%d = s8[4] custom-call-done(%u)"
    assert seconds(start, update, product("p"), done, before=SPARSE) == (4, 0)
    assert seconds(start, product("p"), update, done, before=SPARSE) == (7, 3)


CARRIED = f"""
%begin (x: s8[1]) -> (s8[1], s8[4]) {{
  %x = s8[1] parameter(0)
  %g = s8[4] all-gather(%x), {GATHER}
  ROOT %c = (s8[1], s8[4]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (x: s8[1], y: f16[2,2]) -> (f16[2,2], s8[4]) {{
  %x = s8[1] parameter(0)
  %a = f16[2,2] parameter(1)
  {product("p")}
  %g = s8[4] all-gather(%x), {GATHER}
  ROOT %t = (f16[2,2], s8[4]) tuple(%p, %g)
}}

%end (x: s8[1]) -> s8[4] {{
  %x = s8[1] parameter(0)
  %g = s8[4] all-gather(%x), {GATHER}
  ROOT %c = s8[4] custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_carried_collective_moves_only_while_its_carriers_run():
    begin = "%b = (s8[1], s8[4]) fusion(%s), kind=kCustom, calls=%begin"
    take = "%x = s8[1] get-tuple-element(%b), index=0"
    carry = "%c = (f16[2,2], s8[4]) fusion(%x, %a), kind=kOutput, calls=%async_collective_fusion.1"
    again = "%y = s8[4] get-tuple-element(%c), index=1"
    end = "%d = s8[4] fusion(%y), kind=kCustom, calls=%end"
    assert seconds(begin, take, carry, again, end, before=CARRIED) == (4, 0)
    without = "%d = s8[4] fusion(%x), kind=kCustom, calls=%end"
    assert seconds(begin, take, product("p"), without, before=CARRIED) == (7, 3)


def test_another_fusion_with_a_collective_is_synchronous():
    scatter = CARRIED.replace("%begin", "%all-reduce-scatter.1").replace("all-gather", "all-reduce")
    scatter = scatter.replace(
        'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="Sharding"'
    )
    found = estimate(
        "%f = s8[1] fusion(%s), kind=kCustom, calls=%all-reduce-scatter.1", before=scatter
    )
    assert found.exposed == {"reduce-scatter": 3} and found.asynchronous == {"reduce-scatter": 0}


def test_of_a_conditional_the_longest_branch_counts():
    branches = (
        f"%short () -> s8[4] {{\n  %s = s8[1] parameter(0)\n"
        f"  ROOT %g = s8[4] all-gather(%s), {GATHER}\n}}\n\n"
        f"%long () -> f16[2,2] {{\n  %a = f16[2,2] parameter(0)\n  ROOT {product('p')}\n}}\n"
    )
    found = estimate(
        "%i = s32[] parameter(2)",
        "%c = f16[2,2] conditional(%i, %s, %a), branch_computations={%short, %long}",
        "%f = f16[2,2] call(%a), to_apply=%long",
        before=branches,
    )
    assert (found.seconds, found.flops, found.count) == (8, 32, {})


def loop(limit, step, first="constant(0)", attributes=""):
    before = f"""
%body (t: (s32[], f16[2,2])) -> (s32[], f16[2,2]) {{
  %t = (s32[], f16[2,2]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %a = f16[2,2] get-tuple-element(%t), index=1
  %step = s32[] constant({step})
  %i.copied = s32[] copy(%i)
  %next = s32[] add(%i.copied, %step)
  %s = s8[1] constant({{0}})
  {start("g")}
  {done("d", "g")}
  {product("p")}
  ROOT %r = (s32[], f16[2,2]) tuple(%next, %p)
}}

%condition (t: (s32[], f16[2,2])) -> pred[] {{
  %t = (s32[], f16[2,2]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
"""
    lines = (
        f"%zero = s32[] {first}",
        "%first = s32[] copy(%zero)",
        "%init = (s32[], f16[2,2]) tuple(%first, %a)",
        f"%w = (s32[], f16[2,2]) while(%init), condition=%condition, body=%body{attributes}",
    )
    return estimate(*lines, before=before)


@pytest.mark.parametrize(
    ("limit", "step", "first", "times"),
    [
        (5, 1, "constant(0)", 5),
        (5, 1, "constant(1)", 4),
        (8, 2, "constant(0)", 4),  # unrolled
        (7, 2, "constant(0)", 4),
        (0, 1, "constant(0)", 0),
        (5, 1, "parameter(2)", None),
    ],
)
def test_a_loop_counts_as_often_as_it_runs(limit, step, first, times):
    found = loop(limit, step, first)
    runs = 1 if times is None else times
    assert found.seconds == pytest.approx(7 * runs) and found.flops == 16 * runs
    assert found.compute == pytest.approx(4 * runs) and found.count["all-gather"] == runs
    (only,) = found.loops
    assert (only.name, only.times) == ("body", times)
    assert (only.seconds, only.exposed) == (pytest.approx(7), {"all-gather": 3})


def test_the_compiler_knows_how_often_a_loop_runs():
    known = ', backend_config={"known_trip_count":{"n":"3"}}'
    assert loop(5, 1, "parameter(2)", known).loops[0].times == 3


def test_a_collective_beside_a_loop_has_the_links_while_the_loop_sends_nothing():
    quiet = loop_of_products()
    assert seconds(start("g"), *quiet[0], done("d", "g"), before=quiet[1]) == (8, 0)


def loop_of_products():
    before = f"""
%body (t: (s32[], f16[2,2])) -> (s32[], f16[2,2]) {{
  %t = (s32[], f16[2,2]) parameter(0)
  %a = f16[2,2] get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=0
  {product("p")}
  ROOT %r = (s32[], f16[2,2]) tuple(%i, %p)
}}
"""
    known = 'condition=%none, body=%body, backend_config={"known_trip_count":{"n":"2"}}'
    init = "%init = (s32[], f16[2,2]) tuple(%i, %a)"
    return ("%i = s32[] constant(0)", init, f"%w = (s32[], f16[2,2]) while(%init), {known}"), before


def test_an_unknown_instruction_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"instruction infeed is not known.*%mine = "):
        estimate("%mine = ((f16[2]), token[]) infeed(%a)")
    with pytest.raises(ValueError, match=r"custom-call of 'tpu_custom_call' is not known.*%mine"):
        estimate('%mine = f16[2,2] custom-call(%a), custom_call_target="tpu_custom_call"')
    with pytest.raises(ValueError, match=r"instruction send is not known"):
        estimate("%mine = (f16[2,2], u32[], token[]) send(%a)")


def test_of_a_tpu_the_estimated_cycles_count():
    chip = Chip("toy", 4.0, 1.0, 1.0, 2, 0.0, clock=2.0, ring_of=4, torus=(4,))
    cycles = product("p") + ', backend_config={"window_config":{"estimated_cycles":"10"}}'
    none = product("q") + ', backend_config={"estimated_cycles":"9223372036854775807"}'
    assert seconds(cycles, chip=chip) == (5, 0)
    assert seconds(cycles, none, chip=chip) == (5 + 3 * 8, 0)  # by its bytes
    assert seconds(cycles, f"%g = s8[4] all-gather(%s), {GATHER}", chip=chip) == (6.5, 1.5)
