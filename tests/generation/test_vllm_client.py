"""The client of vLLM servers against a stand-in that fails in every way a server can.

Files: ``generation/vllm/base.py``, ``generation/vllm/client.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import threading
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from support.fakes.fake_vllm import GENERATE, FakeVLLM, begun_together

from groupwise.errors import BackendError
from groupwise.generation.vllm import client as client_module
from groupwise.generation.vllm.base import Request, group_requests, make_completion
from groupwise.generation.vllm.client import (
    LostAnswerError,
    LostWeightsError,
    VLLMServers,
    parse_url,
)


@pytest.fixture
def servers(fake):
    client = VLLMServers([fake.url], timeout=60.0, hint=lambda url: "; start it with: vllm serve tiny")
    fake.version, client.steps = f"{client.run_id}:3", [3]
    yield client
    client.close()


def submit(client, count=1, samples=2, limit=8, max_logprobs=20, **sampling):
    requests = [Request([5, 6 + i], range(samples), seed=10 + i, max_tokens=limit) for i in range(count)]
    return [
        client.submit(one, one.params({"temperature": 1.0, **sampling}, max_logprobs)) for one in requests
    ]


def ask(client, **given):
    with begun_together(client):
        futures = submit(client, **given)
    return [future.result(timeout=120) for future in futures]


def test_answers_become_completions_in_order(servers):
    first, second = ask(servers, count=2)
    assert [completion.token_ids for completion in first] == [[6, 14, 0, 1], [6, 14, 1, 1]]
    assert second[1].token_ids == [7, 15, 1, 1]
    assert first[0].logps == [-0.5, -1.0, -1.5, -2.0] and first[0].versions == [3, 3, 3, 3]
    assert not first[0].truncated
    assert ask(servers, limit=2)[0][0].truncated


def answer(candidates: bool, lengths=(700, 3, 0, 1), **form) -> tuple[dict, bytes]:
    """A response of choices of these lengths, and its JSON."""
    choices = []
    for index, length in enumerate(lengths):
        entries = [{"token_id": i, "logprob": -i / 7, "rank": None} for i in range(length)]
        if candidates:
            entries = [
                {**one, "top_logprobs": [one, {**one, "token_id": 9}][: i % 3]}
                for i, one in enumerate(entries)
            ]
        mask = (
            [[one["token_id"] for one in entry["top_logprobs"]] for entry in entries] if candidates else None
        )
        ids = [one["token_id"] for one in entries]
        choices.append({"index": index, "note": '"},{"', "token_ids": ids, "logprobs": {"content": entries}})
        choices[-1]["sampling_mask"] = mask
    response = {"request_id": '"content":[{ ]}]} },{', "choices": choices, "prompt_token_ids": None}
    return response, json.dumps(response, **form).encode()


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("part", [1, 7, 100, 2**16])
def test_the_numbers_of_a_response_are_those_of_its_parts(candidates, part):
    response, text = answer(candidates, separators=(",", ":"))
    flat = lambda lists: [*itertools.chain(*lists)]  # noqa: E731
    reader, largest = client_module.GenerationReader(candidates), 0
    for start in range(0, len(text), part):
        reader.feed(text[start : start + part])
        largest = max(largest, len(reader.text))
    for choice, left in zip(response["choices"], json.loads(reader.text)["choices"], strict=True):
        content = choice["logprobs"].pop("content")
        found = reader.entries(left["logprobs"].pop("content"))
        assert found.ids.tolist() == [one["token_id"] for one in content]
        assert found.ids == reader.entries(left.pop("token_ids"), client_module._IDS).ids
        assert choice.pop("token_ids") == found.ids.tolist()
        assert found.logps.tolist() == np.float32([one["logprob"] for one in content]).tolist()
        tops = [[one["token_id"] for one in entry["top_logprobs"]] for entry in content if candidates]
        assert found.counts.tolist() == [*map(len, tops)] and found.kept.tolist() == flat(tops)
        assert found.kept.tolist() == flat(choice["sampling_mask"] or []) or not candidates
        found = reader.entries(left.pop("sampling_mask") or [], client_module._MASK)
        assert found.counts.tolist() == [*map(len, choice["sampling_mask"] or [])]
        assert found.kept.tolist() == flat(choice.pop("sampling_mask") or [])
        assert left == choice
    assert len(reader.lists) == 3 * (2 + candidates)  # of lengths 700, 3 and 1: an empty list stays
    assert largest < 600 + part + 220  # an entry at most stays undecoded


def test_another_form_of_json_is_decoded_whole(servers, monkeypatch):
    for text in (answer(True)[1], b'{"choices":[{"logprobs":{"content":[{"token_id":1', b"[]", b""):
        reader = client_module.GenerationReader(True)
        reader.feed(text)
        assert reader.text == text
    expected = [ask(servers, top_k=top_k) for top_k in (0, 2)]
    read = client_module.GenerationReader.feed
    monkeypatch.setattr(
        client_module.GenerationReader,
        "feed",
        lambda reader, part: read(reader, json.dumps(json.loads(part)).encode()),
    )
    again = [ask(servers, top_k=top_k) for top_k in (0, 2)]
    assert [one.logps for one in expected[1][0]] == [one.logps for one in again[1][0]]
    masks = [[one.sampling_mask.ids.tolist() for one in given[1][0]] for given in (expected, again)]
    assert masks[0] == masks[1] and again[0] == expected[0]


def test_a_piece_is_decoded_at_a_time(monkeypatch):
    """Each in the time of a piece, in which no other thread runs."""
    text, sizes = answer(False, (20_000,), separators=(",", ":"))[1], []
    add = client_module._Entries.add
    monkeypatch.setattr(
        client_module._Entries, "add", lambda *given: sizes.append(len(given[1])) or add(*given)
    )
    client_module.GenerationReader(False).feed(text)
    assert sum(sizes) > 0.9 * len(text) and max(sizes) < client_module.PIECE + 220


def test_a_response_is_not_held(servers):
    text = answer(False, (40_000,), separators=(",", ":"))[1]

    class Parts(httpx.AsyncByteStream):
        async def __aiter__(self):
            for start in range(0, len(text), 2**16):
                yield text[start : start + 2**16]

    (server,) = servers.servers
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Parts()))
    server.http = httpx.AsyncClient(base_url=server.url, transport=transport)

    async def peak():
        await server._send("POST", GENERATE, {}, client_module.GenerationReader(False))  # its imports
        tracemalloc.start()
        try:
            reader = client_module.GenerationReader(False)
            await server._send("POST", GENERATE, {}, reader)
            assert len(reader.lists[0].ids) == 40_000
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(peak()) < len(text) / 2  # two numbers of 8 bytes per entry, and one part


def test_equal_token_ids_of_samples_are_one_object():
    made = [make_completion([int("31999")] * 2, [-1.0, -1.0], "stop", [(1, 2)], None) for _ in range(2)]
    assert len({id(token) for completion in made for token in completion.token_ids}) == 1


def test_a_sampled_token_has_twelve_bytes_of_ids_and_log_probs_and_one_version_is_one_number():
    logps = np.float32([-0.1, -9999.0, -0.3]).tolist()  # of vLLM: float32, printed exactly
    one, two = (
        make_completion([5, 6, 7], logps, "stop", runs, None) for runs in ([(4, 3)], [(3, 1), (4, 2)])
    )
    assert one.versions == [4, 4, 4] and two.versions == [3, 4, 4]
    assert one.logps[::2] == logps[::2] and math.isnan(one.logps[1])
    many = make_completion([5] * 1001, [-1.0] * 1001, "stop", [(4, 1001)], None)
    assert many.token_ids.__sizeof__() - [].__sizeof__() == 8 * 1001  # without room for more
    assert vars(many)["logps"].itemsize == 4 and vars(many)["versions"].stride() == (0,)


def test_a_server_that_reports_no_weights_of_tokens_is_asked_for_its_own(servers, fake):
    fake.release = "0.31.0"
    ((completion, _),) = ask(servers)
    assert completion.versions == [3, 3, 3, 3] and fake.seen["/weight_info"] == 1
    fake.version = "another run:3"
    with pytest.raises(LostWeightsError):
        ask(servers)


def test_a_request_asks_for_all_samples_with_the_seed_and_the_sampled_tokens_log_probs(servers, fake):
    ask(servers, samples=4)
    (body,) = [body for path, body in fake.bodies if path == GENERATE]
    expected = {"temperature": 1.0, "n": 4, "seed": 10, "max_tokens": 8, "logprobs": 0}
    assert body == {"token_ids": [5, 6], "sampling_params": expected}


def test_with_top_k_the_kept_tokens_are_requested(servers, fake):
    ((completion,),) = ask(servers, samples=1, top_k=3, top_p=0.9)
    assert completion.token_ids == [6, 14, 0, 1]
    assert completion.sampling_mask.ids.tolist() == [6, 7, 14, 15, 0, 1, 1, 2]
    assert completion.sampling_mask.counts.tolist() == [2, 2, 2, 2]
    # Without top_k any number of tokens may be kept, greedy decoding keeps one, and 20 is the server's limit.
    for sampling in ({"top_p": 0.9}, {"top_k": 3, "temperature": 0.0}, {"top_k": 21}, {"top_k": -1}):
        ((completion,),) = ask(servers, samples=1, **sampling)
        assert completion.sampling_mask is None
    logprobs = [body["sampling_params"]["logprobs"] for path, body in fake.bodies if path == GENERATE]
    assert logprobs == [3, 0, 0, 0, 0]


def test_sampling_masks_of_the_servers_are_exact_for_every_truncation(servers, fake):
    fake.info["model_config"]["return_sampling_mask"] = True
    no_limit = 2**31 - 1
    for sampling, top_k in (
        ({"top_k": 300, "top_p": 0.9}, 300),
        ({"top_p": 0.9}, no_limit),
        ({"min_p": 0.1, "top_k": -1}, no_limit),
        ({"temperature": 0.0, "top_p": 0.9}, 1),  # greedy: the most probable token
    ):
        ((completion,),) = ask(servers, samples=1, max_logprobs=None, **sampling)
        assert completion.sampling_mask.ids.tolist() == [6, 8, 14, 16, 0, 2, 1, 3]
        assert completion.sampling_mask.counts.tolist() == [2, 2, 2, 2]
        sent = fake.bodies[-1][1]["sampling_params"]
        assert sent["top_k"] == top_k and sent["temperature"] == 1.0 and sent["logprobs"] == 0


def test_greedy_samples_of_a_prompt_are_requested_once(servers, fake):
    (samples,) = ask(servers, samples=3, temperature=0.0)
    (body,) = [body for path, body in fake.bodies if path == GENERATE]
    assert body["sampling_params"]["n"] == 1  # vLLM refuses more
    assert [completion.token_ids for completion in samples] == [[6, 14, 0, 1]] * 3


def test_a_missing_log_prob_is_nan(servers, fake):
    fake._generate = lambda body: {
        "choices": [
            {
                "index": 0,
                "token_ids": [1],
                "logprobs": {"content": [{"token_id": 1, "logprob": -9999.0}]},
                "finish_reason": "stop",
                "weight_versions": [{"version": fake.version, "start": 0, "end": 1}],
            }
        ]
    }
    assert math.isnan(ask(servers, samples=1)[0][0].logps[0])


def changed(fake, change):
    """Make the server answer ``change(its answer)``; returns the text of the error after all attempts."""
    generate = fake._generate

    def answer(body):
        found = generate(body)
        return found if (other := change(found)) is None else other

    fake._generate = answer


def in_choice(name, value):
    """Return a change of the first choice: its field ``name`` becomes ``value(old value)``."""

    def change(answer):
        choice = answer["choices"][0]
        choice[name] = value(choice[name])

    return change


def in_content(name, value, at=1):
    def change(answer):
        entry = answer["choices"][0]["logprobs"]["content"][at]
        entry[name] = value(entry[name])

    return change


def as_long(count):
    """Return a change of the first choice: it has ``count`` tokens, each with all that belongs to it."""

    def change(answer):
        choice = answer["choices"][0]
        choice["token_ids"] = (choice["token_ids"] * count)[:count]
        entries = choice["logprobs"]["content"] * count
        choice["logprobs"]["content"] = [
            {**entry, "token_id": token}
            for entry, token in zip(entries[:count], choice["token_ids"], strict=True)
        ]
        choice["weight_versions"][0]["end"] = count

    return change


def with_id(token):
    def change(answer):
        choice = answer["choices"][0]
        choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = token

    return change


def spans(*edges):
    def change(old):
        return [{**old[0], "start": start, "end": end} for start, end in edges]

    return in_choice("weight_versions", change)


BAD_ANSWERS = {
    "no choices": (lambda answer: {"choices": []}, "0 choices"),
    "fewer choices": (lambda answer: {"choices": answer["choices"][:1]}, "1 choices"),
    "more choices": (in_choice("index", lambda old: 2), "2 choices that are not 0 to 1"),
    "one choice twice": (lambda answer: {"choices": [answer["choices"][0]] * 2}, "2 choices that are not"),
    "a list": (lambda answer: [], "TypeError"),
    "an empty record": (lambda answer: {}, "KeyError: 'choices'"),
    "a web page": (lambda answer: "<html><h1>Bad gateway</h1></html>", "web page for .*Bad gateway"),
    "a text": (lambda answer: "queued", "'queued'"),
    "a choice that is none": (lambda answer: {"choices": [None, None]}, "TypeError"),
    "no log-probs": (in_choice("logprobs", lambda old: None), "TypeError"),
    "no entries": (in_choice("logprobs", lambda old: {"content": None}), "ValidationError.*got `null`"),
    "an entry that is none": (in_choice("logprobs", lambda old: {"content": [3]}), "ValidationError"),
    "a string as entry": (in_choice("logprobs", lambda old: {"content": ["9"]}), "IndexError"),
    "lists as entries": (in_choice("logprobs", lambda old: {"content": [[0, 9]]}), "ValidationError"),
    "one log-prob less": (
        in_choice("logprobs", lambda old: {"content": old["content"][:-1]}),
        "other tokens",
    ),
    "log-probs of other ids": (in_content("token_id", lambda old: old + 1), "log-probs of other tokens"),
    "NaN": (in_content("logprob", lambda old: math.nan), "JSON is malformed"),
    "a probability above 1": (in_content("logprob", lambda old: old + 5), "log-probs that are not at most 0"),
    "infinity": (in_content("logprob", lambda old: math.inf), "JSON is malformed"),
    "a text as log-prob": (in_content("logprob", str), "ValidationError.*got `str`"),
    "too many tokens": (as_long(9), "9 tokens, where 1 to 8 were asked for"),
    "no tokens": (as_long(0), "0 tokens, where 1 to 8"),
    "an id beyond the vocabulary": (with_id(32), "token ids outside of 0 to 31"),
    "a huge id": (with_id(10**30), "OverflowError|ValidationError"),
    "a negative id": (with_id(-1), "token ids outside"),
    "a fractional id": (with_id(3.0), "ValidationError.*got `float`"),
    "no weights": (in_choice("weight_versions", lambda old: None), "TypeError"),
    "weights of no tokens": (spans(), "do not cover its 4 tokens"),
    "weights of half of the tokens": (spans((0, 2)), "do not cover its 4 tokens"),
    "weights of tokens that are not there": (spans((0, 10**12)), "do not cover its 4 tokens"),
    "overlapping weights": (spans((0, 2), (0, 2)), "do not cover its 4 tokens"),
    "weights in reverse": (spans((0, 4), (4, 2), (2, 4)), "do not cover its 4 tokens"),
    "an unknown end": (in_choice("finish_reason", lambda old: ["stop"]), "TypeError"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_that_is_no_sample_is_asked_for_again_and_ends_in_an_error(servers, fake, name):
    change, message = BAD_ANSWERS[name]
    undisturbed, servers.vocab_size = ask(servers), 32
    generate = fake._generate
    changed(fake, change)
    with pytest.raises(ConnectionError, match=message) as caught:
        ask(servers)
    assert fake.url in str(caught.value) and "failed 4 times while generating" in str(caught.value)
    assert fake.seen[GENERATE] == 1 + 4

    def once(body):
        fake._generate = generate
        answer = generate(body)
        return answer if (other := change(answer)) is None else other

    fake._generate = once
    assert ask(servers) == undisturbed


@pytest.mark.parametrize("mask", [[[6, 8], [14], [0]], [[6], [14], [2], [1]], [[6], [99], [0], [1]], 3])
def test_a_sampling_mask_without_the_sampled_tokens_is_refused(servers, fake, mask):
    servers.vocab_size = 32
    fake.info["model_config"]["return_sampling_mask"] = True
    changed(fake, in_choice("sampling_mask", lambda old: mask))
    with pytest.raises(ConnectionError, match="cannot be used"):
        ask(servers, max_logprobs=None, top_p=0.9)


def test_kept_tokens_without_the_sampled_one_are_refused(servers, fake):
    changed(fake, in_content("top_logprobs", lambda old: old[1:]))
    with pytest.raises(ConnectionError, match="a sampling mask without the sampled tokens"):
        ask(servers, top_k=3)


@pytest.mark.parametrize("version", ["run:2", "run:4", "run:three", None, 7])
def test_weights_that_were_not_sent_for_the_request_are_noticed(servers, fake, version):
    servers.steps, fake.version = [2, 3], version  # 2 was sent, but not since the step of the request
    with pytest.raises(LostWeightsError, match=fake.url):
        ask(servers)


@pytest.mark.parametrize("answer", [[], {}, "<!DOCTYPE html>", {"results": []}, {"results": 3}, None, 5])
def test_answers_of_other_routes_are_checked_where_they_enter(servers, fake, answer):
    given = fake.answer
    replaced = {"/weight_info", "/collective_rpc", "/get_world_size", "/list_workers", "/metrics"}
    fake.answer = lambda path, *rest: answer if path in replaced else given(path, *rest)
    fake.release = "0.31.0"
    named = re.escape(fake.url)
    with pytest.raises(ConnectionError, match=named):
        ask(servers)
    for call in (servers.fetch_world_sizes, partial(servers.call_workers, "method", {})):
        with pytest.raises(LostAnswerError, match=named):
            call()
    with pytest.raises(ConnectionError, match=named):
        servers.find_workers()
    (server,) = servers.servers
    assert servers._background.submit(server.fetch_num_tokens()).result(timeout=30) == 0
    servers.adapter = "run:1:3"
    replaced |= {"/v1/models"}
    fake.adapters[servers.adapter], fake.failures[GENERATE] = {}, [500]
    with pytest.raises(ConnectionError, match=named):
        ask(servers)


def test_a_request_that_a_server_lost_is_repeated_although_it_serves_others(servers, fake, monkeypatch):
    monkeypatch.setattr(client_module, "LONGEST", 3)
    servers.servers[0].timeout = 4.0  # it reads the metrics every 0.5 s
    undisturbed = ask(servers)
    count, left, passed = itertools.count(1), [], []
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr(client_module, "time", clock)

    def hang():
        left.extend([6.0, 6.0])  # only hanging requests take long: seconds that pass between two readings
        return "hang"

    def serve_others():
        fake.tokens = float(next(count))
        if left:
            passed.append(left.pop())

    fake.failures["/metrics"] = [serve_others] * 200
    fake.failures[GENERATE] = [hang]
    assert ask(servers) == undisturbed and fake.seen[GENERATE] == 3
    fake.failures[GENERATE] = [hang] * 4
    with pytest.raises(
        ConnectionError, match=r"failed 4 times.*not this request in 3 times vllm_server_timeout=4 s"
    ):
        ask(servers)


@pytest.mark.parametrize("failure", [500, 503, 429, "drop", "abort"])
def test_a_request_is_sent_again_when_its_answer_is_lost(servers, fake, failure):
    undisturbed = ask(servers)
    fake.failures[GENERATE] = [failure, failure]
    assert ask(servers) == undisturbed
    assert fake.seen[GENERATE] == 1 + 3


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refused_request_is_not_repeated(servers, fake, status):
    fake.failures[GENERATE] = [status]
    with pytest.raises(BackendError, match=f"{status}: as planned") as caught:
        ask(servers)
    assert not isinstance(caught.value, ConnectionError)
    assert fake.seen[GENERATE] == 1


def test_repeated_server_errors_raise_a_connection_error_with_the_last_message(servers, fake):
    fake.failures[GENERATE] = [500] * 10
    with pytest.raises(ConnectionError, match=r"failed 4 times while generating 2 completions.*as planned"):
        ask(servers)
    assert fake.seen[GENERATE] == 4


def test_without_a_server_the_error_has_the_start_command(fake):
    fake.close()
    client = VLLMServers([fake.url], timeout=0.5, hint=lambda url: "; start it with: vllm serve tiny")
    with pytest.raises(ConnectionError, match=r"vllm_server_timeout=0.5 s while connecting.*vllm serve tiny"):
        client.wait_until_up("connecting")
    client.close()


def test_a_server_that_comes_back_within_the_timeout_gets_the_request_again(servers, fake):
    port = fake.http.server_port
    back = []

    def restart():
        time.sleep(0.6)
        back.append(FakeVLLM(port))
        back[0].version = f"{servers.run_id}:3"

    def die():
        fake.close()
        threading.Thread(target=restart).start()
        return "drop"

    undisturbed = ask(servers)
    fake.failures[GENERATE] = [die]
    assert ask(servers) == undisturbed
    assert back[0].seen[GENERATE] == 1
    back[0].close()


def test_weights_of_another_run_are_noticed(servers, fake):
    fake.version = "default"
    with pytest.raises(LostWeightsError):
        ask(servers)
    fake.version = "0123456789ab:3"
    with pytest.raises(LostWeightsError):
        ask(servers)


def test_lost_weights_are_noticed_before_the_request_is_repeated(servers, fake):
    def forget():
        fake.version = "default"

    fake.failures[GENERATE] = [503, 200]
    fake.failures["/health"] = [forget]
    with pytest.raises(LostWeightsError):
        ask(servers)
    assert fake.seen[GENERATE] == 1


def test_a_server_that_hangs_raises_an_error(fake):
    client = VLLMServers([fake.url], timeout=1.0)
    fake.failures[GENERATE] = ["hang"]
    with pytest.raises(ConnectionError, match="no progress for vllm_server_timeout=1 s while generating"):
        ask(client)
    client.close()


def test_a_slow_server_has_no_time_limit_while_it_generates(fake):
    client = VLLMServers([fake.url], timeout=3.0)
    fake.version, client.steps = f"{client.run_id}:0", [0]

    def work():
        for _ in range(45):  # one and a half times the timeout
            time.sleep(0.1)
            fake.tokens += 8

    fake.failures[GENERATE] = [work]
    assert len(ask(client)[0]) == 2
    client.close()


def test_connections_are_kept_and_closed_ones_replaced(servers, fake):
    for _ in range(5):
        ask(servers)
    assert fake.connections == 1
    for connection in list(fake.http.open_connections):
        connection.shutdown(2)  # as a server does with a connection that was idle for long
    time.sleep(0.1)
    ask(servers)
    assert fake.connections == 2 and fake.seen[GENERATE] == 6 and fake.seen["/health"] == 0


def test_a_connection_is_given_up_after_a_server_error(servers, fake):
    fake.failures[GENERATE] = [500]
    ask(servers)
    assert fake.connections == 2


def test_waiting_ends_when_the_client_is_closed(servers, fake):
    fake.failures[GENERATE] = ["hang"]
    (future,) = submit(servers)
    time.sleep(0.2)
    servers.close()
    with pytest.raises(RuntimeError, match="'vllm-client' was closed"):
        future.result(timeout=30)


def test_the_key_is_sent_and_never_shown(fake, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    client = VLLMServers([fake.url], timeout=60.0)
    fake.failures[GENERATE] = [401]
    with pytest.raises(BackendError, match="VLLM_API_KEY") as caught:
        ask(client)
    assert fake.keys == {"Bearer s3cret"} and "s3cret" not in str(caught.value)
    client.close()


def test_prompts_are_spread_over_the_servers_and_weights_go_to_all():
    fakes = [FakeVLLM(), FakeVLLM()]
    client = VLLMServers([fake.url for fake in fakes], timeout=60.0)
    client.pause()
    assert all(fake.paused for fake in fakes)
    client.init_weight_transfer_engine({"init_info": {"rank_offset": 1, "world_size": 3}})
    offsets = [
        dict(fake.bodies)["/init_weight_transfer_engine"]["init_info"]["rank_offset"] for fake in fakes
    ]
    assert offsets == [1, 2]
    client.steps = [7]
    client.start_weight_update()
    client.update_weights({"update_info": {"names": ["a"]}})
    client.finish_weight_update("7")
    client.resume()
    for fake in fakes:
        assert fake.version == f"{client.run_id}:7" and not fake.paused
        assert dict(fake.bodies)["/update_weights"] == {"update_info": {"names": ["a"]}}
        assert fake.seen["/reset_prefix_cache"] == 1
    answers = ask(client, count=4)
    assert [answer[0].versions[0] for answer in answers] == [7] * 4
    assert [fake.seen[GENERATE] for fake in fakes] == [2, 2]
    client.close()
    for fake in fakes:
        fake.close()


def test_a_request_goes_to_the_server_with_the_fewest_in_flight(monkeypatch):
    monkeypatch.setattr(client_module, "CONCURRENCY", 1)
    fakes, slow = [FakeVLLM(), FakeVLLM()], threading.Event()
    fakes[0].failures[GENERATE] = [lambda: slow.wait(30) and None]
    client = VLLMServers([fake.url for fake in fakes], timeout=30.0)
    client.steps = [3]
    for fake in fakes:
        fake.version = f"{client.run_id}:3"
    futures = submit(client, count=6)
    by_the_other = [future.result(timeout=30)[0].token_ids[0] for future in futures[1:]]
    slow.set()
    assert [futures[0].result(timeout=30)[0].token_ids[0], *by_the_other] == [6 + i for i in range(6)]
    assert [fake.seen[GENERATE] for fake in fakes] == [1, 5]
    client.close()
    for fake in fakes:
        fake.close()


def test_a_weight_call_is_sent_once(servers, fake):
    fake.failures["/update_weights"] = [500]
    with pytest.raises(LostAnswerError, match="as planned"):
        servers.update_weights({})
    assert fake.seen["/update_weights"] == 1


def test_server_addresses_are_parsed():
    with pytest.raises(BackendError, match="ftp://x"):
        parse_url("ftp://x")
    for url in ("http://host:8000/?key=1", "http://host:port", "host:70000"):
        with pytest.raises(BackendError, match="is not the address of a server"):
            parse_url(url)
    for url in ("http://user:secret@host:8000", "user:secret@host"):
        with pytest.raises(BackendError, match="set VLLM_API_KEY") as refused:
            parse_url(url)
        assert "secret" not in str(refused.value)
    assert parse_url("localhost:9000") == "http://localhost:9000"
    assert parse_url("http://0.0.0.0:8000/") == "http://127.0.0.1:8000"
    assert parse_url("https://host/prefix/") == "https://host:443/prefix"


def test_neighbouring_rows_of_a_prompt_are_one_request():
    prompts = [[1, 2], [1, 2], [3], [3], [1, 2]]
    requests = group_requests(prompts, [4, 4, 4, 8, 4], seed=0, step=2, rank=0)
    assert [list(request.rows) for request in requests] == [[0, 1], [2], [3], [4]]
    assert [request.max_tokens for request in requests] == [4, 4, 8, 4]
    # The third sample of [1, 2] counts on from the first two, wherever it stands.
    assert requests[3].seed == requests[0].seed + 2
    assert requests[2].seed == requests[1].seed + 1


def test_given_seeds_are_those_of_the_samples_on_any_rank():
    prompts, given = [[1, 2]] * 4 + [[1, 2]], [7, 8, 9, 10, 30]
    alone = group_requests(prompts, [4] * 5, seed=0, step=2, rank=0, seeds=given)
    assert [(request.seed, list(request.rows)) for request in alone] == [(7, [0, 1, 2, 3]), (30, [4])]
    second = group_requests(prompts[3:], [4] * 2, seed=0, step=2, rank=1, seeds=given[3:])
    assert [(request.seed, len(request.rows)) for request in second] == [(10, 1), (30, 1)]


def test_seeds_depend_on_run_seed_step_rank_and_prompt():
    def seed(prompts, at, **given):
        return group_requests(prompts, [4] * len(prompts), **{"seed": 0, "step": 2, "rank": 0, **given})[
            at
        ].seed

    reference = seed([[1, 2], [3]], 0)
    assert seed([[3], [1, 2]], 1) == reference
    others = {seed([[1, 2]], 0, **change) for change in ({"seed": 1}, {"step": 3}, {"rank": 1})}
    assert len(others | {reference, seed([[2, 1]], 0)}) == 5
    assert all(0 <= value < 2**63 for value in others)
