"""Break the code on purpose and see that a named test fails: `python -m tests.mutations [NAME ...]`.

Each mutation is applied to a temporary copy of the packages and tests that it needs; the working tree is not touched.
Its tests must pass on the unchanged copy and fail on the changed one. A mutation with a reason in `survives` is
expected to pass: the reason says why no test can or should see it. The result is the table of tests/MUTATIONS.md;
--write puts it there. Exit status: 0 when every mutation did what it is listed to do, else 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = (
    "kernels",
    "protos",  # with the generated gRPC code
    "kvstore",
    "worker",
    "router",
    "tests/kernels",
    "tests/unit",
    "tests/scenarios",
    "tests/certificates.py",
    "tests/conftest.py",
    "pyproject.toml",
)
DOCUMENT = ROOT / "tests" / "MUTATIONS.md"
MARK = "<!-- written by python -m tests.mutations --write -->"


class Mutation(NamedTuple):
    """Textual edits; each `old` occurs exactly once in its file (tests/kernels/test_mutations.py watches that)."""

    name: str
    edits: tuple[tuple[str, str, str], ...]  # file, old, new
    tests: tuple[str, ...]  # at least one test of each must fail
    survives: str = ""  # why it is expected to pass


TABLES, ROTATION, BITPACK = "kernels/tables.py", "kernels/rotation.py", "kernels/bitpack.py"
CODEC, FP8, LAYOUT, REPORT = "kernels/turboquant.py", "kernels/fp8.py", "kernels/layout.py", "kernels/codec_report.py"
TEST_TABLES, TEST_CODEC = "tests/kernels/test_tables.py::", "tests/kernels/test_turboquant.py::"
TEST_ON_CPU = "tests/kernels/test_turboquant_on_cpu.py::"
TEST_FP8, TEST_LAYOUT = "tests/kernels/test_fp8.py::", "tests/kernels/test_layout.py::"
TEST_REPORT = "tests/kernels/test_codec_report.py::"
CUBINS, ARCHIVE, TEST_ARCHIVE = "kernels/cubins.py", "kernels/archive.py", "tests/kernels/test_archive.py::"
RETENTION, SEQUENCES, GROUP_PAGES = "kvstore/retention.py", "kvstore/sequences.py", "kvstore/group_pages.py"
ROLLBACK, KEPT, RINGS = "kvstore/rollback.py", "kvstore/kept_boundaries.py", "kvstore/pending_rings.py"
MATCH, TEST_PHASES = "kvstore/prefix_match.py", "tests/unit/test_kv_phases.py::"
DEVICE, HASH, PAGE_CODEC = "kvstore/device.py", "protos/page_hash.py", "kernels/page_codec.py"
KV_VIEW, KV_MOVES, SEQUENCE_KV = "worker/kv_view.py", "worker/kv_moves.py", "worker/sequence_kv.py"
TEST_RETENTION, TEST_SEQUENCES = "tests/unit/test_kv_retention.py::", "tests/unit/test_kv_sequences.py::"
TEST_MOVES, TEST_ENGINE = "tests/unit/test_kv_moves.py::", "tests/unit/test_engine_packed.py::"
TEST_BAKED = "tests/unit/test_baked.py::"
TEST_LEDGER, TEST_BUDGET = "tests/unit/test_ledger.py::", "tests/unit/test_memory_budget.py::"
TEST_HASH = "tests/unit/test_page_hash.py::"
TEST_PACKED, TEST_PAGE_CODEC = "tests/scenarios/test_kvstore_packed.py::", "tests/kernels/test_page_codec.py::"
FRAGMENTS, TEST_FRAGMENTS = "kernels/fragments.py", "tests/kernels/test_fragments.py::"
CHECKSUM, TEST_CHECKSUM = "kernels/page_checksum.py", "tests/kernels/test_page_checksum.py::"
GEOMETRY, TEST_GEOMETRY = "kvstore/geometry.py", "tests/unit/test_geometry.py::"
TEST_ATTENTION, TEST_VERIFY = "tests/kernels/test_attention.py::", "tests/unit/test_kv_verify.py::"
V4 = "worker/models/deepseek_v4_"
V4_HYPER, V4_MOE, V4_ROPE, V4_INDEXER = V4 + "hyper.py", V4 + "moe.py", V4 + "rope.py", V4 + "indexer.py"
TEST_V4, TEST_V4_LOADING = "tests/unit/test_deepseek_v4_failures.py::", "tests/unit/test_deepseek_v4_loading.py::"
FLOOR = "return max(0, n - (window + max(t - 1, margin)))"
ANSWER_STATE, TEST_STATE = "router/answer_state.py", "tests/unit/test_answer_state.py::"
RESUMABLE, RESUME = "worker/resumable.py", "router/resume.py"
TEST_RESUMABLE, TEST_ROUTER_RESUME = "tests/unit/test_resumable.py::", "tests/scenarios/test_router_resume.py::"
TEST_WORKER_RESUME = "tests/scenarios/test_worker_resume.py::"
TEST_CLIENT, TEST_BENCH = "tests/scenarios/test_client.py::", "tests/unit/test_bench_statistics.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "drop the signs",
        ((ROTATION, "torch.from_numpy(signs(width))", "torch.ones(width)"),),
        (TEST_CODEC + "test_constant_rows_need_the_signs", TEST_CODEC + "test_rotation_is_d_h_d"),
    ),
    Mutation(
        "drop the norm correction",
        ((CODEC, "short / chosen * _power_of_two(exponent)", "short * _power_of_two(exponent)"),),
        (TEST_CODEC + "test_the_corrected_scale_is_stored",),
    ),
    Mutation(
        "swap nibbles, in the writer only",
        ((BITPACK, "codes[0::2] | codes[1::2] << 4", "codes[1::2] | codes[0::2] << 4"),),
        (TEST_CODEC + "test_presets_stay_within_the_papers_bound",),
    ),
    Mutation(
        "swap nibbles, in writer and reader alike",
        (
            (BITPACK, "codes[0::2] | codes[1::2] << 4", "codes[1::2] | codes[0::2] << 4"),
            (BITPACK, "columns >> bits * j &", "columns >> bits * (1 - j if bits == 4 else j) &"),
        ),
        (
            TEST_CODEC + "test_records_equal_a_plain_decoder_byte_by_byte",
            TEST_CODEC + "test_nibbles_and_groups_lie_where_the_format_says",
        ),
    ),
    Mutation(
        "shift a boundary by one cell",
        ((CODEC, "for boundary in table.boundaries:", "for boundary in table.boundaries[1:]:"),),
        (TEST_CODEC + "test_codes_are_the_nearest_values", TEST_CODEC + "test_ties_go_to_the_upper_cell"),
    ),
    Mutation(
        "exponent (d-1)/2",
        (
            (TABLES, "np.cos(nodes) ** (d - 2)", "np.cos(nodes) ** d"),
            (TABLES, "(d - 1) / 2 * np.log1p", "(d + 1) / 2 * np.log1p"),
            (TABLES, "- logs[..., :-1]) / (d - 1)", "- logs[..., :-1]) / (d + 1)"),
            (TABLES, "(1 - edges**2) ** ((d - 3) / 2)", "(1 - edges**2) ** ((d - 1) / 2)"),
        ),
        (
            TEST_TABLES + "test_codebooks_fit_random_vectors_and_no_other_exponent",
            TEST_TABLES + "test_codebooks_equal_the_published_digits",
            TEST_REPORT + "test_distortion_within_two_percent",
            TEST_TABLES + "test_everything_checked_in_is_what_the_generator_writes",
        ),
    ),
    Mutation(
        "exponent (d-1)/2 in Newton's derivative only",
        ((TABLES, "(1 - edges**2) ** ((d - 3) / 2)", "(1 - edges**2) ** ((d - 1) / 2)"),),
        (TEST_TABLES + "test_codebooks_are_stationary_to_1e_9",),
    ),
    Mutation(
        "ties go away from zero below it",
        ((CODEC, ".sub_(negative.view(torch.uint8))", ""),),
        (TEST_CODEC + "test_ties_go_to_the_upper_cell",),
    ),
    Mutation(
        "a sign bit for -0",
        ((CODEC, "negative = y < 0", "negative = y.signbit()"),),
        (TEST_CODEC + "test_a_rotated_unit_vector_hits_zero_exactly_and_codes_it_positive",),
    ),
    Mutation(
        "no zero threshold",
        ((CODEC, "ZERO_NORM = 1e-10", "ZERO_NORM = 0.0"),),
        (TEST_CODEC + "test_zero_rows_are_exact",),
    ),
    Mutation(
        "no amax prescale",
        ((CODEC, "clamp_(-100, 124)", "clamp_(0, 0)"),),
        (TEST_CODEC + "test_every_finite_row_up_to_1e37_comes_back_finite",),
    ),
    Mutation(
        "no check for NaN and infinity",
        ((CODEC, "    check_finite(rows)\n", ""),),
        (TEST_CODEC + "test_rows_that_are_not_finite_are_named",),
    ),
    Mutation(
        "largest norm per part instead of per row",
        ((CODEC, "+= (norm / MAX_NORM).square()", "= (norm / MAX_NORM).square()"),),
        (TEST_CODEC + "test_rows_beyond_1e37_are_named",),
    ),
    Mutation(
        "no clamp to f16's range",
        ((CODEC, "            x.clamp_(-largest, largest)\n", "            pass\n"),),
        (TEST_CODEC + "test_the_largest_f16_row_comes_back_finite",),
    ),
    Mutation(
        "butterflies in the other order",
        (
            (ROTATION, "    distance = 1\n", "    distance = width // 2\n"),
            (ROTATION, "    while distance < width:", "    while distance >= 1:"),
            (ROTATION, "        distance *= 2\n", "        distance //= 2\n"),
        ),
        (TEST_ON_CPU + "test_pack_and_unpack_equal_the_reference_bit_for_bit",),
    ),
    Mutation(
        "norm by torch's own sum",
        ((CODEC, "    while squares.shape[0] > 1:", "    squares = squares.sum(0, keepdim=True)\n    while False:"),),
        (
            TEST_CODEC + "test_a_row_does_not_depend_on_its_neighbours",
            TEST_ON_CPU + "test_pack_and_unpack_equal_the_reference_bit_for_bit",
        ),
    ),
    Mutation(
        "3-bit groups of ten without their last bytes' zeros",
        ((BITPACK, "padded = torch.zeros(", "padded = torch.ones("),),
        (TEST_CODEC + "test_records_equal_a_plain_decoder_byte_by_byte",),
    ),
    Mutation(
        "V4 scale one power of two too large at 7/8 of a power",
        ((FP8, "> 0x600000", ">= 0x600000"),),
        (TEST_FP8 + "test_v4_scale_is_exact_at_every_bf16",),
    ),
    Mutation(
        "page padding keeps old bytes",
        ((LAYOUT, "heads * at.head_bytes] = 0", "0] = 0"),),
        (TEST_LAYOUT + "test_planes_are_aligned_disjoint_and_converters_inverse",),
    ),
    Mutation(
        "planes without alignment",
        (("kernels/page_layout.py", "PLANE_ALIGNMENT = 128", "PLANE_ALIGNMENT = 64"),),
        (TEST_LAYOUT + "test_planes_are_aligned_disjoint_and_converters_inverse",),
    ),
    Mutation(
        "report: the QJL stage contributes nothing",
        ((REPORT, "coarse + qjl * residual", "coarse + 0 * qjl * residual"),),
        (TEST_REPORT + "test_the_unbiased_variant_is_unbiased_and_noisier",),
    ),
    Mutation(
        "leave one arch out of an archive",
        ((CUBINS, "pairs = pairs_of(cells, arches)", "pairs = pairs_of(cells, arches[:-1])"),),
        (TEST_ARCHIVE + "test_the_whole_archive_passes_and_is_described",),
    ),
    Mutation(
        "an arch that was left out is not missed",
        ((ARCHIVE, "Finding(cell, arch, Status.MISSING,", "Finding(cell, arch, Status.OBSERVED,"),),
        (TEST_ARCHIVE + "test_an_arch_left_out_is_a_failure", TEST_ARCHIVE + "test_one_cell_left_out_is_a_failure"),
    ),
    Mutation(
        "an empty listing passes",
        (
            (
                ARCHIVE,
                'Finding(cell, arch, Status.UNANSWERED, f"{INSPECTOR} printed no kernel',
                'Finding(cell, arch, Status.OBSERVED, f"{INSPECTOR} printed no kernel',
            ),
        ),
        (TEST_ARCHIVE + "test_an_empty_listing_is_no_answer",),
    ),
    Mutation(
        "an empty listing counts as a missing kernel",
        (
            (
                ARCHIVE,
                'Finding(cell, arch, Status.UNANSWERED, f"{INSPECTOR} printed no kernel',
                'Finding(cell, arch, Status.WRONG, f"{INSPECTOR} printed no kernel',
            ),
        ),
        (TEST_ARCHIVE + "test_an_empty_listing_is_no_answer",),
    ),
    Mutation(
        "the arch is believed from the file's name",
        ((ARCHIVE, "sorted({facts.arch for facts in kernels} - {arch})", "sorted({arch} - {arch})"),),
        (TEST_ARCHIVE + "test_a_file_name_is_not_believed",),
    ),
    Mutation(
        "over-evict: the reach is the window only",
        ((RETENTION, FLOOR, "return max(0, n - window)"),),
        (
            TEST_RETENTION + "test_each_term_where_it_binds",
            TEST_SEQUENCES + "test_sliding_window_over_a_prefill_and_400_steps_with_rollbacks_inside_the_margin",
        ),
    ),
    Mutation(
        "retention floor without the step's own tokens",
        ((RETENTION, FLOOR, "return max(0, n - (window + margin))"),),
        (
            TEST_RETENTION + "test_each_term_where_it_binds",
            TEST_RETENTION + "test_no_query_of_this_step_or_after_a_rollback_reaches_behind_the_floor",
        ),
    ),
    Mutation(
        "retention floor without the margin",
        ((RETENTION, FLOOR, "return max(0, n - (window + t - 1))"),),
        (
            TEST_RETENTION + "test_each_term_where_it_binds",
            TEST_SEQUENCES + "test_sliding_window_over_a_prefill_and_400_steps_with_rollbacks_inside_the_margin",
        ),
    ),
    Mutation(
        "retention floor below token 0",
        ((RETENTION, FLOOR, "return n - (window + max(t - 1, margin))"),),
        (TEST_RETENTION + "test_each_term_where_it_binds",),
    ),
    Mutation(
        "retention floor without the window",
        ((RETENTION, FLOOR, "return max(0, n - max(t - 1, margin))"),),
        (TEST_RETENTION + "test_each_term_where_it_binds",),
    ),
    Mutation(
        "a span ignores where the tail begins in its ring",
        (
            (
                KV_VIEW,
                "parts += view.ring(place.tail_slot, begin, end - begin)",
                "parts += view.ring(place.tail_slot, begin - place.base // ratio, end - begin)",
            ),
        ),
        (TEST_MOVES + "test_a_span_is_dequantised_below_the_base_and_a_view_of_the_tail_above",),
    ),
    Mutation(
        "the scale is dropped from the record",
        (
            (
                PAGE_CODEC,
                "for plane, source in zip((planes.codes, planes.scales), records, strict=True):",
                "for plane, source in zip((planes.codes,), records[:1], strict=True):",
            ),
        ),
        (
            TEST_PAGE_CODEC + "test_records_are_those_of_the_codec",
            TEST_MOVES + "test_a_truncate_restores_the_rows_of_every_ratio",
        ),
    ),
    Mutation(
        "the scale is dropped where a record is copied",
        ((PAGE_CODEC, "for plane in (planes.codes, planes.scales):\n", "for plane in (planes.codes,):\n"),),
        (TEST_PAGE_CODEC + "test_a_split_page_keeps_the_records_below_the_cut_and_packs_the_rest",),
    ),
    Mutation(
        "fragments of keys with their two halves swapped, in writer and reader alike",
        ((FRAGMENTS, "16 * m + g + 8 * half", "16 * m + g + 8 * (1 - half)"),),
        (TEST_FRAGMENTS + "test_bytes_are_those_of_the_definition",),
    ),
    Mutation(
        "fragments of values with their rows in plain order, in writer and reader alike",
        ((FRAGMENTS, "2 * t + (j >> 1) + 8 * (j & 1)", "4 * t + j"),),
        (TEST_FRAGMENTS + "test_bytes_are_those_of_the_definition",),
    ),
    Mutation(
        "a lane's words of fragments in pairs instead of fours",
        ((FRAGMENTS, "together = min(4, words)", "together = min(2, words)"),),
        (TEST_FRAGMENTS + "test_bytes_are_those_of_the_definition",),
    ),
    Mutation(
        "fragments are read by the writer's map",
        ((FRAGMENTS, "field_bits, device).argsort()", "field_bits, device)"),),
        (
            TEST_FRAGMENTS + "test_every_bit_of_a_group_is_a_bit_of_one_code",
            TEST_FRAGMENTS + "test_converters_are_inverse",
            TEST_PAGE_CODEC + "test_pages_of_fragments_hold_and_give_the_same_rows",
            TEST_ATTENTION + "test_pages_of_fragments_read_as_pages_of_rows",
            TEST_MOVES + "test_the_order_of_pages_changes_no_row",
        ),
    ),
    Mutation(
        "the top bits of 3-bit fragments are read as zero",
        ((FRAGMENTS, "index_select(1, places) << shift", "index_select(1, places) << 0"),),
        (
            TEST_FRAGMENTS + "test_converters_are_inverse",
            TEST_ATTENTION + "test_pages_of_fragments_read_as_pages_of_rows",
        ),
    ),
    Mutation(
        "scales of a group in the order of its rows, in writer and reader alike",
        (
            (FRAGMENTS, "return by_row.transpose(-3, -2).reshape", "return by_row.reshape"),
            (FRAGMENTS, "return by_place.transpose(-3, -2).reshape", "return by_place.reshape"),
        ),
        (TEST_FRAGMENTS + "test_scales_are_those_of_the_definition_and_come_back",),
    ),
    Mutation(
        "rows behind a cut start at their group's first row",
        ((PAGE_CODEC, "old[:, :, first_row - begin : end - begin] = new", "old[:, :, : end - first_row] = new"),),
        (
            TEST_PAGE_CODEC + "test_parts_of_pages_of_fragments_are_copied_and_written_row_by_row",
            TEST_MOVES + "test_the_order_of_pages_changes_no_row",
        ),
    ),
    Mutation(
        "a group that is written in part forgets its other rows",
        (
            (
                PAGE_CODEC,
                "for old, new in zip(whole, records",
                "for old, new in zip([w.zero_() for w in whole], records",
            ),
        ),
        (
            TEST_PAGE_CODEC + "test_parts_of_pages_of_fragments_are_copied_and_written_row_by_row",
            TEST_MOVES + "test_the_order_of_pages_changes_no_row",
        ),
    ),
    Mutation(
        "fragments are looked at as records",
        ((PAGE_CODEC, "if self.fragments is not None:", "if False:"),),
        (TEST_PAGE_CODEC + "test_planes_of_fragments_have_no_records_to_look_at",),
    ),
    Mutation(
        "shared rows become fragments as well",
        (("kernels/page_layout.py", 'region.kind not in ("k", "v")', 'region.kind not in ("k", "v", "kv")'),),
        (
            TEST_LAYOUT + "test_which_regions_version_2_keeps_as_fragments",
            TEST_GEOMETRY + "test_presets_give_keys_and_shared_rows_the_key_bits",
        ),
    ),
    Mutation(
        "an unknown page layout version passes",
        (("kernels/page_layout.py", "VERSIONS = (ROWS, FRAGMENTS)", "VERSIONS = (ROWS, FRAGMENTS, 0, 3, 7)"),),
        (
            TEST_LAYOUT + "test_refusals_name_what_is_wrong",
            TEST_GEOMETRY + "test_what_is_refused_by_name",
            TEST_GEOMETRY + "test_page_layout_is_the_makers_choice_and_decides_bytes",
        ),
    ),
    Mutation(
        "a geometry loses its page layout on the wire",
        ((GEOMETRY, "page_layout_version=message.page_layout_version,", ""),),
        (
            TEST_GEOMETRY + "test_proto_round_trip_keeps_everything",
            TEST_GEOMETRY + "test_page_layout_is_the_makers_choice_and_decides_bytes",
        ),
    ),
    Mutation(
        "the digest does not cover the page layout",
        ((GEOMETRY, "planes {self.page_layout_version} page {", "planes 1 page {"),),
        (TEST_GEOMETRY + "test_digest_covers_group_and_geometry_fields",),
    ),
    Mutation(
        "every piece of a page has the first one's keys",
        ((CHECKSUM, "keyed += np.uint32(first * KEY_STEP % 2**32)", "pass"),),
        (TEST_CHECKSUM + "test_long_pages_go_on_with_their_keys",),
    ),
    Mutation(
        "the checksum has no keys",
        ((CHECKSUM, "* KEY_STEP + KEY_START", "* 0"),),
        (
            TEST_CHECKSUM + "test_it_is_the_formula",
            TEST_CHECKSUM + "test_extremes",
            TEST_CHECKSUM + "test_pinned",
            TEST_CHECKSUM + "test_one_bit_two_words_and_two_halves_are_told_apart",
        ),
    ),
    Mutation(
        "pages in device memory are read by the store",
        (("kvstore/verify.py", "if stored == NO_CHECKSUM or not self._readable(name):", "if stored == NO_CHECKSUM:"),),
        (TEST_VERIFY + "test_pages_in_device_memory_are_left_out_and_counted",),
    ),
    Mutation(
        "pages without a known checksum are compared all the same",
        (
            (
                "kvstore/verify.py",
                "if stored == NO_CHECKSUM or not self._readable(name):",
                "if not self._readable(name):",
            ),
        ),
        (TEST_VERIFY + "test_a_changed_byte_is_found_in_its_page",),
    ),
    Mutation(
        "a fork shares the tail",
        ((SEQUENCES, "self._tail_slots(child.slot),", "self._tail_slots(slot),"),),
        (TEST_ENGINE + "test_a_fork_and_its_parent_do_not_touch_each_other",),
    ),
    Mutation(
        "a fork's tail is not copied",
        ((SEQUENCES, "[TailCopy(name, slot, child.slot) for name in self._tailed],", "[],"),),
        (
            TEST_SEQUENCES + "test_a_fork_shares_sealed_pages_and_copies_what_is_open",
            TEST_ENGINE + "test_a_fork_and_its_parent_do_not_touch_each_other",
        ),
    ),
    Mutation(
        "page hash without the salt",
        ((HASH, "for part in (salt.encode(), weights_digest,", "for part in (weights_digest,"),),
        (
            TEST_HASH + "test_every_part_counts",
            TEST_SEQUENCES + "test_a_match_leaves_a_token_to_compute_and_never_crosses_salts",
        ),
    ),
    Mutation(
        "pins are not returned with their holder",
        ((SEQUENCES, "        self.index.unpin(name, let_go)\n", ""),),
        (TEST_SEQUENCES + "test_pins_return_with_the_attachment_and_cached_pages_are_evicted_when_promises_need_room",),
    ),
    Mutation(
        "pins are not returned on detach",
        ((DEVICE, "return len(slots), self.release(slots)", "return len(slots), 0"),),
        (TEST_PACKED + "test_pins_end_with_the_attachment_and_cached_pages_serve_the_next_one",),
    ),
    Mutation(
        "a deep truncate forgets a ratio-4 region",
        (
            (
                KV_MOVES,
                "            if view.packed is None:\n                continue\n",
                "            if view.packed is None or view.region.ratio == 4:\n                continue\n",
            ),
        ),
        (TEST_MOVES + "test_a_truncate_restores_the_rows_of_every_ratio",),
    ),
    Mutation(
        "a truncate into a dense page forgets a ratio-4 region",
        (
            (
                KV_MOVES,
                "            if view.pages is not None:\n",
                "            if view.pages is not None and view.region.ratio != 4:\n",
            ),
        ),
        (TEST_MOVES + "test_a_truncate_into_a_sealed_dense_page_keeps_the_rows_of_every_ratio",),
    ),
    Mutation(
        "a truncate forgets the pending rows of a ratio-4 region",
        ((ROLLBACK, "pending = num_tokens and state.group.has_pending", "pending = False"),),
        (TEST_SEQUENCES + "test_pending_rows_go_back_to_the_last_kept_boundary_or_not_at_all",),
    ),
    Mutation(
        "what a block carries over from the one before is not kept",
        ((GEOMETRY, "// self.block * self.block - self.carry)", "// self.block * self.block)"),),
        (
            TEST_GEOMETRY + "test_which_pending_rows_a_length_needs",
            TEST_GEOMETRY + "test_a_tail_holds_what_the_bound_says_whatever_the_length",
        ),
    ),
    Mutation(
        "a ring of pending rows forgets the margin",
        ((GEOMETRY, "region.pending_reach + self.margin + self.", "region.pending_reach + self."),),
        (TEST_PHASES + "test_a_rollback_inside_the_margin_is_exact_at_every_phase",),
    ),
    Mutation(
        "rows that guesses wrote over count as held",
        ((RINGS, "geometry.ring_rows(group, region) - under_way", "geometry.ring_rows(group, region)"),),
        (TEST_PHASES + "test_what_rings_hold_after_rollbacks",),
    ),
    Mutation(
        "a rollback leaves the rings as they were",
        ((RINGS, "return self if num_tokens >= first else", "return self if True else"),),
        (TEST_PHASES + "test_what_rings_hold_after_rollbacks",),
    ),
    Mutation(
        "all checkpoints keep their open page in one place",
        (
            (
                KEPT,
                "return self._num_pages[group] + _slot(checkpoint) - self._first_slot",
                "return self._num_pages[group]",
            ),
        ),
        (TEST_PHASES + "test_every_checkpoint_keeps_an_open_page_of_its_own",),
    ),
    Mutation(
        "a token taken back over a page's start is sought in the checkpoint's open page",
        ((MATCH, "checkpoint, group.name) if from_kept else pages[whole] if", "checkpoint, group.name) if"),),
        (TEST_PHASES + "test_a_kept_boundary_resumes_exactly_at_every_phase",),
    ),
    Mutation(
        "the prompt's end is not kept",
        (
            (
                GROUP_PAGES,
                "self.group.keep_every, self.prompt_pages)\n\n    @",
                "self.group.keep_every, range(0))\n\n    @",
            ),
        ),
        (TEST_PHASES + "test_retention_keeps_every_nth_page_and_the_prompts_end",),
    ),
    Mutation(
        "the refill after a deep rollback is skipped",
        ((SEQUENCE_KV, '        kv_moves.refill_tails(self.kv, truncated.refills, "rollback", self._on_gpu)\n', ""),),
        (TEST_ENGINE + "test_a_deep_rollback_then_300_steps",),
    ),
    Mutation(
        "the refill after a deep rollback is not asked for",
        ((GROUP_PAGES, "refill = (target, end - target, state.pages[first : pages_for(end)])", "pass"),),
        (
            TEST_SEQUENCES + "test_the_answer_says_what_to_refill",
            TEST_SEQUENCES + "test_deep_rollback_then_300_more_steps",
        ),
    ),
    Mutation(
        "V4: the mixing matrix as it is, not transposed",
        ((V4_HYPER, "(by.carry.unsqueeze(-1) *", "(by.carry.transpose(1, 2).unsqueeze(-1) *"),),
        (TEST_V4 + "test_the_mixing_matrix_is_transposed_when_streams_are_written",),
    ),
    Mutation(
        "V4: rows of the mixing matrix balanced first",
        ((V4_HYPER, "sum(-2, keepdim=True).add_(eps))\n    for", "sum(-1, keepdim=True).add_(eps))\n    for"),),
        (TEST_V4 + "test_the_mixing_matrix_is_balanced_columns_first_with_epsilon_in_every_sum",),
    ),
    Mutation(
        "V4: no clamp on the shared expert",
        (
            (
                V4_MOE,
                "config.swiglu_limit, deterministic=batch.deterministic)\n    out",
                "float('inf'), deterministic=batch.deterministic)\n    out",
            ),
        ),
        (TEST_V4 + "test_the_shared_expert_is_clamped_as_the_others_are",),
    ),
    Mutation(
        "V4: the router's bias in the weights",
        (
            (
                V4_MOE,
                "chosen = affinity.gather",
                "chosen = (affinity if weights.bias is None else affinity + weights.bias).gather",
            ),
        ),
        (TEST_V4 + "test_the_routers_bias_chooses_experts_and_does_not_weigh_them",),
    ),
    Mutation(
        "V4: experts looked up by position",
        ((V4_MOE, "weights.table[batch.token_ids]", "weights.table[batch.positions % len(weights.table)]"),),
        (TEST_V4 + "test_hash_layers_look_up_the_steps_own_tokens_wherever_a_prefix_ends",),
    ),
    Mutation(
        "V4: YaRN on layers with the window alone",
        ((V4_ROPE, "config.rope_theta, None)", "config.rope_theta, config.yarn)"),),
        (TEST_V4 + "test_each_layer_rotates_all_of_its_rows_by_one_base",),
    ),
    Mutation(
        "V4: the window's base on compressed layers",
        ((V4_ROPE, "config.compress_rope_theta, config.yarn", "config.rope_theta, config.yarn"),),
        (TEST_V4 + "test_each_layer_rotates_all_of_its_rows_by_one_base",),
    ),
    Mutation(
        "V4: positions in bfloat16",
        ((V4_ROPE, "positions.to(torch.float32)", "positions.to(torch.bfloat16)"),),
        (TEST_V4 + "test_positions_of_a_million_tokens_keep_their_distances",),
    ),
    Mutation(
        "V4: of equal scores the last",
        ((V4_INDEXER, "equal.cumsum(1) <= room", "equal.flip(1).cumsum(1).flip(1) <= room"),),
        (TEST_V4 + "test_ties_of_the_indexer_take_the_lowest_row_in_every_shape_of_step",),
    ),
    Mutation(
        "V4: the indexer sees a block too many",
        ((V4_INDEXER, "device=scores.device) >= num_visible", "device=scores.device) > num_visible"),),
        (TEST_V4 + "test_the_indexer_chooses_among_the_past_alone",),
    ),
    Mutation(
        "V4: all products of the indexer together",
        ((V4_INDEXER, "step = max(1, _SCORES // max(1, heads * len(keys)))", "step = max(1, num_queries)"),),
        (TEST_V4 + "test_the_indexers_memory_is_bounded_whatever_the_length",),
    ),
    Mutation(
        "V4: the phase of a block by rows of the step",
        (
            (
                V4 + "compressor.py",
                "weights.ape[positions % weights.ratio]",
                "weights.ape[torch.arange(len(positions)) % weights.ratio]",
            ),
        ),
        (TEST_V4 + "test_padding_rows_enter_no_block_and_shift_no_phase",),
    ),
    Mutation(
        "V4: a resume without the window that was kept",
        ((KV_MOVES, "kv.copy_tail(copy.group, copy.from_slot, copy.to_slot)", "pass"),),
        (TEST_V4 + "test_a_request_sent_again_is_answered_from_kv_and_alike",),
    ),
    Mutation(
        "V4: rows of the batch's first sequence for all",
        (
            (
                V4 + "kv_rows.py",
                "self._batch.groups[view.group.name].places[span]",
                "self._batch.groups[view.group.name].places[0]",
            ),
        ),
        (TEST_V4 + "test_a_slot_that_others_used_holds_nothing_of_them_and_gives_every_page_back",),
    ),
    Mutation(
        "V4: scales left out of the weights digest",
        (
            (
                "worker/checkpoint.py",
                "self._names = sorted(expected)",
                "self._names = sorted(name for name in expected if not expected[name].is_scale)",
            ),
        ),
        (TEST_V4_LOADING + "test_the_digest_covers_scales_names_and_every_byte",),
    ),
    Mutation(
        "V4: w1 and w3 of an expert swapped",
        (
            (
                "worker/models/deepseek_v4.py",
                'weights.pop(f"{at}{name}.w1.weight"), weights.pop(f"{at}{name}.w3.weight")',
                'weights.pop(f"{at}{name}.w3.weight"), weights.pop(f"{at}{name}.w1.weight")',
            ),
        ),
        (TEST_V4_LOADING + "test_the_whole_model_is_what_its_tensors_say_by_hand",),
    ),
    Mutation(
        "V4: what a model takes told as its files have it",
        (
            (
                "worker/memory_plan.py",
                "sizes[0] += wanted.num_values * item_bytes",
                "sizes[0] += file_bytes",
            ),
        ),
        (
            TEST_V4_LOADING + "test_what_is_planned_is_what_is_held",
            TEST_V4_LOADING + "test_flash_is_refused_with_what_it_would_take_and_nothing_is_read",
        ),
    ),
    Mutation(
        "resume: an abort of a complete answer taken for a cancel",
        ((RESUMABLE, "            answer.is_complete = True\n", ""),),
        (
            TEST_RESUMABLE + "test_a_complete_answer_is_kept_and_a_cancelled_one_is_not",
            TEST_ROUTER_RESUME + "test_what_its_first_router_ended_at_a_stop_string_ends_there_again",
        ),
    ),
    Mutation(
        "resume: another tenant's answer found",
        (
            (
                RESUMABLE,
                "answer is not None and answer.submit.tenant == tenant else None",
                "answer is not None else None",
            ),
        ),
        (
            TEST_RESUMABLE + "test_another_tenant_finds_nothing",
            TEST_WORKER_RESUME + "test_find_tells_routers_what_they_need_and_foreign_tenants_nothing",
        ),
    ),
    Mutation(
        "resume: the grace time not begun anew at the end",
        (
            (
                RESUMABLE,
                "        if answer.idle_since is not None:\n            answer.idle_since = self._clock()\n",
                "",
            ),
        ),
        (TEST_RESUMABLE + "test_the_grace_time_begins_with_the_end_where_that_is_later",),
    ),
    Mutation(
        "resume: a replay that does not wait for More",
        ((RESUMABLE, "if self.told_end or self.waits_for_more:", "if self.told_end:"),),
        (TEST_WORKER_RESUME + "test_a_long_replay_shares_its_session_with_others",),
    ),
    Mutation(
        "resume: kept answers without a bound on their bytes",
        ((RESUMABLE, "while self._kept and self.num_bytes + num_bytes > self._limits.max_bytes:", "while False:"),),
        (
            TEST_RESUMABLE + "test_bytes_are_bounded_by_what_running_logs_may_come_to",
            TEST_RESUMABLE + "test_random_lives_leave_no_gap_no_repeat_and_no_byte",
        ),
    ),
    Mutation(
        "resume: a session's end that aborts resumable sequences",
        (
            (
                "worker/sessions.py",
                "            self._answers.leave(subscription)\n        self.subscriptions.clear()",
                "            self._answers.cancel(subscription.answer)\n        self.subscriptions.clear()",
            ),
        ),
        (TEST_WORKER_RESUME + "test_a_session_that_ends_leaves_its_resumable_sequences_alone",),
    ),
    Mutation(
        "resume: a lost call that aborts",
        (
            (
                "router/subscription.py",
                "        if self.resumable:\n            self.link.leave",
                "        if False:\n            self.link.leave",
            ),
        ),
        (
            TEST_ROUTER_RESUME + "test_only_a_resumable_request_outlives_its_call",
            TEST_ROUTER_RESUME + "test_cut_at_every_token_it_is_the_same_through_either_router",
        ),
    ),
    Mutation(
        "resume: text skipped by characters instead of bytes",
        (("router/replay.py", "data = text.encode()", 'data = text.encode("utf-16-le")[::2]'),),
        (TEST_ROUTER_RESUME + "test_an_answer_that_ended_is_read_again_from_every_place",),
    ),
    Mutation(
        "resume: a place ahead of the answer waited for",
        (("router/relay.py", " or self.num_tokens >= skip.num_known:", ":"),),
        (TEST_ROUTER_RESUME + "test_places_ahead_of_the_answer_are_refused",),
    ),
    Mutation(
        "resume: the text begun at the caller's place instead of token 0",
        (
            (
                "router/relay.py",
                "self._take([token_id], logprobs[position : position + 1], shown)",
                "self._take([token_id], logprobs[position : position + 1], shown if not self._first_token else '')",
            ),
        ),
        (TEST_ROUTER_RESUME + "test_cut_at_every_token_it_is_the_same_through_either_router",),
    ),
    Mutation(
        "resume: behind a stop string no More is said",
        (
            (
                "router/relay.py",
                "(self._settle_until is not None or self._pending_bytes",
                "(self._settle_until is None and self._pending_bytes",
            ),
        ),
        (TEST_ROUTER_RESUME + "test_a_long_replay_comes_in_pieces_and_waits_for_a_slow_reader",),
    ),
    Mutation(
        "resume: what a worker that is away may have taken for nothing",
        (("router/find.py", "if failures or away:", "if failures:"),),
        (TEST_ROUTER_RESUME + "test_where_a_worker_cannot_be_asked_not_found_would_be_a_guess",),
    ),
    Mutation(
        "resume: the placement that was given up counts",
        (("router/find.py", "answer.attempt > best[0]", "answer.attempt < best[0]"),),
        (TEST_ROUTER_RESUME + "test_placed_twice_the_later_placement_counts",),
    ),
    Mutation(
        "resume: a call not seen by its like until it is placed",
        (
            (
                RESUME,
                "        self._requests.resumables.firsts.setdefault(self.call.sequence_id, self)\n",
                "",
            ),
        ),
        (TEST_ROUTER_RESUME + "test_many_at_once_run_once",),
    ),
    Mutation(
        "resume: any request with the id joins",
        ((RESUME, "if found is not None and found.digest != digest:", "if False:"),),
        (TEST_ROUTER_RESUME + "test_another_request_with_the_id_is_a_duplicate",),
    ),
    Mutation(
        "resume: a worker without the feature is asked",
        ((RESUME, "return [link for link in super()._links() if link.can_resume()]", "return list(super()._links())"),),
        (TEST_ROUTER_RESUME + "test_a_worker_without_the_feature_is_never_asked",),
    ),
    Mutation(
        "resume: the call's deadline given to the request",
        ((RESUME, "        submit.deadline_unix_ns = 0", "        submit.deadline_unix_ns += 0"),),
        (TEST_ROUTER_RESUME + "test_a_deadline_ends_the_call_and_not_the_request",),
    ),
    Mutation(
        "client: the text's offsets not checked",
        ((ANSWER_STATE, '            ("text", chunk.text_offset, self.num_text_bytes),\n', ""),),
        (TEST_CLIENT + "test_wrong_offsets_are_an_error",),
    ),
    Mutation(
        "client: characters counted for bytes",
        ((ANSWER_STATE, "len(chunk.text.encode())", "len(chunk.text)"),),
        (TEST_CLIENT + "test_cut_at_every_token_a_resumable_answer_is_whole",),
    ),
    Mutation(
        "client: tokens emitted, and tried again",
        ((ANSWER_STATE, "if self._begun and not self.resumable:", "if False:"),),
        (TEST_CLIENT + "test_after_a_token_only_a_resumable_answer_goes_on",),
    ),
    Mutation(
        "client: no room without a hint tried again",
        ((ANSWER_STATE, "return error.retry_after_ms is not None", "return True"),),
        (TEST_CLIENT + "test_what_will_not_pass_is_not_tried_again",),
    ),
    Mutation(
        "client: a call that a stopping router cuts taken for a Cancel",
        ((ANSWER_STATE, "return not failure.spoken", "return False"),),
        (TEST_STATE + "test_a_cancel_that_no_router_speaks_of_is_a_lost_connection",),
    ),
    Mutation(
        "client: a refused request taken for one that is kept",
        ((ANSWER_STATE, " and (self._begun or not failure.spoken)", ""),),
        (TEST_STATE + "test_only_what_a_router_may_keep_is_tried_for_the_grace_time",),
    ),
    Mutation(
        "client: a resumable answer left without a word",
        (
            (
                "router/client.py",
                "                await self._cancel(state.request_id, CANCEL_TIMEOUT_S)",
                "                pass",
            ),
        ),
        (TEST_CLIENT + "test_leaving_the_loop_ends_the_work_behind_it",),
    ),
    Mutation(
        "bench: latencies from when a request was sent",
        (("router/bench_statistics.py", "one.first_token_s - one.intended_s", "one.first_token_s - one.sent_s"),),
        (TEST_BENCH + "test_latencies_count_from_when_a_request_was_due",),
    ),
    Mutation(
        "bench: the warm-up measured",
        (("router/bench_statistics.py", "if one.intended_s < self.begin_s:", "if False:"),),
        (TEST_BENCH + "test_the_warm_up_is_left_out",),
    ),
    Mutation(
        "decode state: seen tokens in memory of their own each time",
        (
            (
                "worker/decode_state.py",
                "        self.seen[row] = _signed(words).to(self.seen.device)",
                "        self.seen = self.seen.clone()\n        self.seen[row] = _signed(words).to(self.seen.device)",
            ),
        ),
        (TEST_BAKED + "test_nothing_moves_in_many_steps_with_sequences_coming_and_going",),
    ),
    Mutation(
        "ledger: what comes later is nobody's business",
        (("worker/ledger.py", "_rest(now, books) - sum(books.phases.values())", "0"),),
        (TEST_LEDGER + "test_what_comes_later_beside_all_owners_is_unknown_and_an_alarm_once",),
    ),
    Mutation(
        "ledger: a storage counted for everybody who looks at it",
        (("worker/ledger.py", "storages(*roots) - claimed:", "storages(*roots):"),),
        (TEST_LEDGER + "test_every_byte_of_a_start_has_an_owner",),
    ),
    Mutation(
        "shell: a worker that starts whatever its budget says",
        (("worker/shell.py", "    budget.demand()\n", "    del plan\n"),),
        (TEST_BUDGET + "test_a_worker_draws_its_budget_up_before_it_reads_weights",),
    ),
    Mutation(
        "bench engine: a difference within the spread called one",
        (("worker/bench_report.py", "    if low > 1:", "    if middle > 1:"),),
        ("tests/unit/test_bench_engine_cli.py::test_a_difference_within_the_spread_is_none",),
    ),
    Mutation(
        "decode graphs: a row taken without a look at what is baked in",
        (("worker/decode_graphs.py", "            self.baked.check()", "            pass"),),
        (TEST_BAKED + "test_the_next_sequence_finds_what_moved",),
    ),
)


def copy_tree(target: Path) -> None:
    """The packages and tests that mutations need, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def apply(mutation: Mutation, root: Path) -> None:
    """Edit the copy under `root`. Raises ValueError where an edit no longer fits the source."""
    for file, old, new in mutation.edits:
        text = (root / file).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{mutation.name}: {old!r} occurs {text.count(old)} times in {file}")
        (root / file).write_text(text.replace(old, new))


def failing(root: Path, tests: tuple[str, ...]) -> list[str]:
    """Which of `tests` fail in the copy. Raises RuntimeError where pytest could not say (no test, a usage error)."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-rfE", *tests]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {tests}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    failed = {line.split()[1].split("[")[0] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))}
    return [test for test in tests if test in failed]


def outcome(mutation: Mutation) -> str:
    """One row of the table; `main` has checked that the tests pass on the unchanged code."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        copy_tree(root)
        apply(mutation, root)
        caught = failing(root, mutation.tests)
    tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in mutation.tests)
    if mutation.survives:
        ok, what = not caught, f"survives: {mutation.survives}"
    else:
        ok, what = len(caught) == len(mutation.tests), "caught"
    if not ok:
        what = f"UNEXPECTED: caught by {caught}"
    return f"| {mutation.name} | {tests} | {what} |"


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if not a.startswith("--")]
    chosen = [m for m in MUTATIONS if not names or m.name in names]
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        broken = failing(Path(name), tuple(dict.fromkeys(test for m in chosen for test in m.tests)))
    if broken or not chosen:
        print(f"these fail without any mutation: {broken}" if broken else f"no mutation is called {names}")
        return 1
    rows = ["| mutation | named tests | outcome |", "|---|---|---|"]
    for mutation in chosen:
        rows.append(outcome(mutation))
        print(rows[-1], flush=True)
    if "--write" in arguments and not names:
        DOCUMENT.write_text(DOCUMENT.read_text().split(MARK)[0] + "\n".join([MARK, "", *rows, ""]))
    return int(any("UNEXPECTED" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
