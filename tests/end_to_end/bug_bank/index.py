"""The bug bank: every entry, what went wrong there, and the tests that show that it does not here.

The numbers are those of a list of public reports about systems that split prefill and decode; the
ones that are missing concern parts that this project does not have yet. A test that moves or gets
another name must be followed here: ``test_index.py`` holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE = "end_to_end/bug_bank/"
SAME = "end_to_end/conformance/test_rows.py::test_the_answer_is_that_of_one_engine"
OTHERS = "end_to_end/conformance/test_endpoints.py::test_the_answer_is_that_of_one_engine"
"""Rows of the conformance suite ask for it, of a cluster and of one engine."""


@dataclass(frozen=True)
class Entry:
    """One report: its kind in a few words, its public source, and the tests of its kind."""

    fault: str
    source: str
    tests: tuple[str, ...]


ENTRIES = {
    "A01": Entry(
        "a disconnect that only decode notices leaves prefill holding the blocks",
        "vllm-project/vllm#50425",
        (
            HERE + "test_cancels.py::test_prefill_is_free_while_decode_has_not_even_heard",
            HERE + "test_cancels.py::test_clients_that_leave_at_every_stage",
            "end_to_end/test_mock_failures.py::test_a_client_that_leaves_at_another_moment",
        ),
    ),
    "A02": Entry(
        "clients that give up under overload leave both sides full",
        "sgl-project/sglang#8177",
        (HERE + "test_cancels.py::test_an_overload_of_clients_that_give_up",),
    ),
    "A03": Entry(
        "pages of an aborted request are used again under a late write",
        "sgl-project/sglang#24527",
        (
            HERE + "test_pages.py::test_a_late_write_meets_nobody_elses_pages",
            "end_to_end/test_mock_failures.py::test_a_stopped_writer_keeps_the_pages",
            "end_to_end/test_mock_failures.py::test_a_stopped_writer_over_tcp_is_shut_out",
        ),
    ),
    "A04": Entry(
        "an abort in the step that ends the prefill kills the engine later",
        "vllm-project/vllm PR#25067",
        (HERE + "test_cancels.py::test_an_abort_that_lands_as_the_prefill_ends",),
    ),
    "A05": Entry(
        "decode refuses before admission and prefill waits for its lease",
        "vllm-project/vllm PR#41269",
        (
            HERE + "test_unclaimed_prefills.py::test_decode_refuses_before_admission",
            HERE + "test_unclaimed_prefills.py::test_decode_refuses_what_prefill_holds_already",
        ),
    ),
    "A06": Entry(
        "a prefill that fails or hangs leaves the decode half waiting",
        "vllm-project/aibrix#2289, sgl-project/sglang#9726",
        (
            HERE + "test_unclaimed_prefills.py::test_a_prompt_that_only_prefill_refuses",
            HERE + "test_unclaimed_prefills.py::test_a_prefill_node_that_stands_still",
            "end_to_end/test_mock_cluster.py::test_a_killed_prefill_engine",
            "unit/router/test_relaying.py::test_a_failed_prefill_leg_does_not_fail_the_request",
        ),
    ),
    "A07": Entry(
        "a decode node that comes back on its address gets no transfer any more",
        "smg-project/smg#2382",
        (
            HERE + "test_restarts.py::test_a_decode_node_comes_back_on_its_ports",
            "contract/test_transport.py::test_a_restarted_peer_is_a_new_peer",
        ),
    ),
    "A08": Entry(
        "decode dies on the first transfer from a prefill node that was restarted",
        "vllm-project/vllm#49238",
        (HERE + "test_restarts.py::test_a_prefill_node_comes_back_on_its_ports",),
    ),
    "A09": Entry(
        "a prefill node that is asked to leave drops what waits to be fetched",
        "ai-dynamo/dynamo#4917",
        (HERE + "test_restarts.py::test_a_prefill_node_that_is_asked_to_leave",),
    ),
    "A10": Entry(
        "different tensor-parallel sizes crash at the first hand-over, or under load",
        "vllm-project/vllm#43523, sgl-project/sglang#15674",
        (
            "end_to_end/test_mock_split.py::test_lengths",
            "end_to_end/test_mock_split.py::test_many_at_once",
            "end_to_end/test_vllm_tensor_parallel.py::test_text_equals_one_engine",
            "unit/config/test_checks.py::test_pools_that_do_not_fit_are_refused",
            "unit/router/test_agents.py::test_a_node_is_welcomed_and_one_that_differs_is_refused",
            HERE + "test_starts.py::test_another_memory_layout_is_refused",
        ),
    ),
    "A11": Entry(
        "decode takes the first token or the context of another request",
        "sgl-project/sglang#17259",
        (
            HERE + "test_wrong_output.py::test_nobody_gets_somebody_elses_answer",
            "end_to_end/test_mock_failures.py::test_prompts_that_differ_are_refused",
        ),
    ),
    "A12": Entry(
        "known KV that ends inside a block counts as a whole block",
        "vllm-project/vllm PR#34616",
        (
            HERE + "test_wrong_output.py::test_a_second_turn_after_a_part_of_a_block",
            "end_to_end/test_mock_split.py::test_known_beginnings",
        ),
    ),
    "A13": Entry(
        "a prompt that is wholly known leaves nothing to compute",
        "LMCache/LMCache PR#3322",
        (
            HERE + "test_wrong_output.py::test_a_prompt_that_is_wholly_known",
            "end_to_end/test_mock_split.py::test_lengths",
        ),
    ),
    "A14": Entry(
        "a preempted request waits for a transfer that it has had",
        "vllm-project/vllm PR#53250",
        (HERE + "test_pages.py::test_a_preempted_request_does_not_wait_for_pages_again",),
    ),
    "A15": Entry(
        "the client's min_tokens meets the one token of the prefill leg",
        "vllm-project/vllm PR#16705",
        (
            SAME,
            "unit/router/test_client_request.py"
            "::test_the_prefill_leg_keeps_only_what_shapes_the_prompt",
        ),
    ),
    "A16": Entry(
        "one token is asked for and two come",
        "sgl-project/sglang PR#7147",
        (SAME,),
    ),
    "A17": Entry(
        "an endpoint that is newer than the split knows nothing of it",
        "sgl-project/sglang#35497",
        (
            OTHERS,
            "unit/router/test_responses.py::test_a_response_is_split",
            "unit/router/test_forwarding.py::test_it_reaches_a_decode_node_as_it_came",
            "unit/router/test_at_the_door.py::test_everything_else_is_a_clear_error",
            "unit/router/test_openapi_examples.py::test_examples",
        ),
    ),
    "A18": Entry(
        "several answers to one prompt never come",
        "ai-dynamo/dynamo#14098",
        (
            SAME,
            "end_to_end/conformance/test_rows.py::test_the_engines_have_lived_and_hold_nothing",
        ),
    ),
    "A19": Entry(
        "prompt_logprobs end the decode engine, which has not computed the prompt",
        "vllm-project/vllm-ascend#13363",
        (
            SAME,
            "end_to_end/conformance/test_rows.py::test_the_engines_have_lived_and_hold_nothing",
        ),
    ),
    "A20": Entry(
        "usage counts every prompt that was sent to decode as cached",
        "vllm-project/router#193",
        (
            SAME,
            "unit/router/test_prompt_usage.py::test_a_stream_has_the_prefill_engines_figure",
            "unit/router/test_prompt_usage.py::test_a_figure_that_comes_late_is_waited_for",
        ),
    ),
    "A21": Entry(
        "a character that is cut between two network chunks breaks the reader",
        "vllm-project/vllm PR#38732",
        (
            "unit/router/test_relaying.py::test_stream_bytes_pass_unchanged",
            "unit/router/test_sent_tokens.py::test_the_ids_are_cut_out_wherever_the_reads_end",
            SAME,
        ),
    ),
    "A22": Entry(
        "a forced tool call is parsed out of the one token of the prefill leg",
        "vllm-project/vllm#38911",
        (
            SAME,
            "unit/router/test_client_request.py"
            "::test_the_prefill_leg_keeps_only_what_shapes_the_prompt",
        ),
    ),
    "A23": Entry(
        "both sides render and tokenise the prompt, and need not agree",
        "vllm-project/vllm#25373",
        (
            "unit/config/test_checks.py::test_pools_that_would_make_different_prompts_are_refused",
            "end_to_end/test_mock_failures.py::test_prompts_that_differ_are_refused",
        ),
    ),
    "A24": Entry(
        "the same prompt at temperature 0 gets different answers",
        "vllm-project/vllm#27086",
        ("end_to_end/conformance/test_repeated.py::test_the_same_again", SAME),
    ),
    "A25": Entry(
        "one adapter is served the KV of another one",
        "vllm-project/vllm#44250",
        (
            OTHERS,
            "end_to_end/test_vllm_cache.py::test_adapters_do_not_share_chunks",
            "unit/router/test_adapters.py::test_it_is_split_between_nodes_that_both_have_it",
            "unit/router/test_adapters.py::test_it_is_alone_where_only_decode_has_it",
        ),
    ),
    "A26": Entry(
        "all pictures share one entry of the cache",
        "LMCache/LMCache#690",
        (
            SAME,
            OTHERS,
            "unit/kv_transfer/cache/test_keys.py::test_a_change_shows_from_its_chunk_on",
            "unit/router/test_client_request.py::test_messages_with_pictures_are_not_split",
        ),
    ),
    "A29": Entry(
        "the store has evicted some of a prompt's chunks, and ranks disagree",
        "LMCache/LMCache#1467",
        (
            HERE + "test_cache_stores.py::test_redis_evicts_and_loses_keys",
            "unit/kv_transfer/cache/test_shared_tier_losses.py::test_what_is_gone_is_written_again",
        ),
    ),
    "A30": Entry(
        "a chunk whose write has failed is read later",
        "LMCache/LMCache#4991",
        (
            HERE + "test_cache_stores.py::test_a_disk_that_is_full_and_files_that_are_spoiled",
            "contract/test_tier.py::test_a_full_store_is_an_outcome",
        ),
    ),
    "A31": Entry(
        "a load waits for ever for room that nothing frees",
        "LMCache/LMCache#2942",
        (HERE + "test_cache_sizes.py::test_a_prompt_larger_than_the_arena",),
    ),
    "A32": Entry(
        "the size of the memory tier is taken once per rank",
        "LMCache/LMCache#2901",
        (
            HERE + "test_cache_sizes.py::test_the_size_is_that_of_the_host",
            HERE + "test_cache_sizes.py::test_more_than_the_machine_has",
        ),
    ),
    "A33": Entry(
        "an object that somebody else has removed stays a hit",
        "LMCache/LMCache PR#4745",
        (HERE + "test_cache_stores.py::test_objects_that_somebody_else_removes",),
    ),
    "A34": Entry(
        "every request pays for a store that does not answer",
        "LMCache/LMCache#1938",
        (HERE + "test_cache_stores.py::test_redis_under_steady_load",),
    ),
    "A35": Entry(
        "an engine's error becomes a 200 with an empty body",
        "vllm-project/vllm-ascend#12166",
        (
            HERE + "test_router.py::test_an_engines_refusal_is_passed_on",
            HERE + "test_router.py::test_a_stream_whose_engine_dies_has_no_clean_end",
            SAME,
            "unit/router/test_at_the_door.py::test_odd_types_are_the_engines_to_judge",
            "unit/router/test_relaying.py::test_an_engines_error_is_passed_on_unchanged",
            "unit/router/test_relaying.py::test_a_stream_that_breaks_ends_with_an_error_event",
        ),
    ),
    "A36": Entry(
        "one engine that hangs blocks requests to all others",
        "vllm-project/production-stack#749",
        (HERE + "test_router.py::test_a_node_that_hangs_is_left_out",),
    ),
    "A37": Entry(
        "a kept connection is used just as the engine closes it",
        "llm-d/llm-d PR#1564",
        (
            HERE + "test_router_connections.py::test_a_kept_connection_that_the_engine_closes",
            "unit/router/test_engine_client.py"
            "::test_an_idle_connection_is_closed_before_the_server_does",
        ),
    ),
    "A38": Entry(
        "clients' mistakes take nodes out of service",
        "sgl-project/sglang#25811",
        (
            HERE + "test_router.py::test_clients_mistakes_are_not_the_nodes",
            "unit/router/test_relaying.py::test_many_refused_requests_leave_the_nodes_alone",
        ),
    ),
    "A39": Entry(
        "one node gets all the work",
        "vllm-project/router PR#198",
        (
            HERE + "test_router.py::test_equal_nodes_do_equal_work",
            "unit/core/test_admission_and_placement.py::test_equal_nodes_get_equal_shares",
        ),
    ),
    "A40": Entry(
        "headers are dropped, and a refused key is the node's fault",
        "sgl-project/sglang PR#3070",
        (
            HERE + "test_router_connections.py::test_what_arrives_of_a_clients_headers",
            HERE + "test_router_connections.py::test_a_wrong_key_touches_no_node",
            HERE + "test_router_connections.py::test_an_engine_that_refuses_the_key",
            "unit/router/test_relaying.py::test_the_header_policy",
            "unit/router/test_at_the_door.py::test_a_wrong_key_is_401",
        ),
    ),
    "A41": Entry(
        "bodies above the framework's default limit are refused",
        "sgl-project/sglang PR#2444",
        (
            HERE + "test_router.py::test_large_bodies",
            HERE + "test_router.py::test_a_body_above_the_limit",
            "unit/router/test_at_the_door.py::test_an_oversized_body_is_413",
        ),
    ),
    "A42": Entry(
        "two servers on one host want the same port",
        "vllm-project/vllm#20965",
        (
            "unit/launch/test_ports.py::test_every_open_port_is_filled_once",
            "unit/launch/test_ports.py::test_a_port_in_use_is_passed_over",
            "unit/config/test_checks.py::test_ports_that_overlap_are_refused",
            "end_to_end/test_up_down.py::test_a_port_in_use_is_refused_before_anything_starts",
        ),
    ),
    "A43": Entry(
        "a threshold of 0 means never where the documentation says always",
        "llm-d/llm-d-router PR#871",
        (
            "unit/router/test_observing.py::test_the_metrics_tell_what_a_threshold_does",
            "unit/config/test_checks.py::test_a_threshold_that_is_none_is_refused",
            "unit/core/test_admission_and_placement.py::test_what_is_split",
            "end_to_end/test_doctor.py::test_planted_misconfigurations",
        ),
    ),
    "A45": Entry(
        "the time per token is the time per event",
        "vllm-project/vllm#27485",
        (
            "unit/cli/test_probe_client.py::test_every_token_of_an_event_counts",
            "unit/cli/test_probe_client.py::test_a_failure_is_no_answer",
            "unit/benchmarks/test_harness.py::test_tokens_are_counted_and_not_events",
            "unit/cli/test_bench.py::test_the_time_per_token_does_not_depend_on_chunks",
        ),
    ),
    "A46": Entry(
        "the transport below is another one than was asked for, and nobody notices",
        "vllm-project/vllm#35799",
        (
            HERE + "test_starts.py::test_what_this_machine_may_lack",
            HERE + "test_starts.py::test_tcp_only",
            HERE + "test_starts.py::test_a_transport_that_does_not_exist",
            HERE + "test_starts.py::test_the_transport_is_shown",
            "end_to_end/test_doctor.py::test_planted_misconfigurations",
        ),
    ),
    "A47": Entry(
        "descriptors of a peer's former life are used for its next one",
        "ai-dynamo/nixl PR#2051",
        (
            HERE + "test_pages.py::test_a_peers_former_life_is_not_asked",
            HERE + "test_restarts.py::test_a_decode_node_comes_back_on_its_ports",
            "contract/test_transport.py::test_a_restarted_peer_is_a_new_peer",
        ),
    ),
}
