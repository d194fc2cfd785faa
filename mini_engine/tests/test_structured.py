"""Structured output: patterns against re, masks against all texts, and models that write what they must."""

import json
import random
import re
from collections import Counter
from functools import reduce
from importlib.util import find_spec
from itertools import product
from operator import or_
from types import SimpleNamespace

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import load
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams, StructuredOutputsParams
from mini_engine.structured import guidance
from mini_engine.structured.automaton import build_dfa
from mini_engine.structured.choose import structured_grammar
from mini_engine.structured.grammar import RegexGrammar, TokenIndex, regex_grammar
from mini_engine.structured.logits import GrammarProcessor, allowed
from mini_engine.structured.nodes import Either, Empty, Nothing, OneOf, Repeat, Sequence
from mini_engine.structured.patterns import parse
from mini_engine.tests.helpers import byte_tokenizer, dense_logits, tiny_model
from mini_engine.tests.soak import SOAK

LETTERS = ["a", "b", "-", "]", "1", " ", "\n", ".", "é", "€", "😀"]
SHORT = ["".join(text) for length in range(4) for text in product(LETTERS, repeat=length)]
PATTERNS = [
    r"", r"a|b|", r"(a|ab)(b|)", r"[ab-]*", r"[]a]+", r"[^]a]", r"[a-b-]?", r"\d\w\s", r"\D\W\S", r".{2}",
    r"a{1,2}b?", r"(?:ab)*", r"\.\]", r"[\d.-]+", r"[^\w]*", r"[é-€]", r"[^é]", r"(a?){2}", r"a{0}b",
    r"((a*)*)*", r"\n|\t| ",
]  # fmt: skip
REFUSED = [
    "(", ")", "a**", "[", "[b-a]", "a{2", "a{2,1}", "a{,2}", "a{999}", "*a", "^a", "a$", r"\q", "(?=a)",
    "(a{99}){99}",
]  # fmt: skip


def accepts(dfa, text):
    state = 0
    for byte in text.encode():
        if byte not in dfa.transitions[state]:
            return False
        state = dfa.transitions[state][byte]
    return state in dfa.accepting


# One of every 101 code points, and those beside the edges of UTF-8's lengths.
EDGES = [point + by for point in (0x80, 0x800, 0x1234, 0xD800, 0xE000, 0x10000, 0x10400) for by in (-1, 0, 1)]
POINTS = [chr(point) for point in (*range(0, 0x110000, 101), *EDGES) if not 0xD800 <= point < 0xE000]
SETS = [
    ".", "[^a]", "[^\x00-\U0010fffe]", "[^\x01-\U0010ffff]", "[\x80-\u07ff]", "[\u1234-\U00010400]",
    "[\U00010203-\U000a0b0c]",
]  # fmt: skip
FIRST = [*map(chr, range(300)), chr(0x10FFFF)]
CLASSES = [rf"\{letter}" for letter in "dwsDWSntrfv.-"]
CLASSES += [r"[^\d]", r"[\w-]", "[ -~]", ".", "[a-a]", "[^a-zc-fz{]"]


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [(p, texts) for some, texts in ((PATTERNS, SHORT), (SETS, POINTS), (CLASSES, FIRST)) for p in some],
)
def test_a_pattern_means_what_it_means_in_re(pattern, texts):
    dfa = build_dfa(parse(pattern))
    wrong = [text for text in texts if accepts(dfa, text) != bool(re.fullmatch(pattern, text, re.ASCII))]
    assert wrong == []


@pytest.mark.parametrize("last", [0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF])
@pytest.mark.parametrize("first", [0, 1, 0x7F, 0x80, 0x800, 0x10000])
def test_a_class_matches_no_bytes_but_its_characters(first, last):
    """There are as many rows of bytes that match as there are characters, without the surrogates."""
    if first > last:
        first, last = last, first
    dfa = build_dfa(parse(f"[{chr(first)}-{chr(last)}]"))
    num_ways, num_texts = Counter({0: 1}), 0
    for _ in range(5):
        steps = [(to, num) for state, num in num_ways.items() for to in dfa.transitions[state].values()]
        num_ways = Counter()
        for state, num in steps:
            num_ways[state] += num
        num_texts += sum(num_ways[state] for state in dfa.accepting)
    assert num_texts == last - first + 1 - len(range(max(first, 0xD800), min(last, 0xDFFF) + 1))


def test_a_class_of_all_characters_of_a_length_is_small():
    tails = OneOf(frozenset(range(0x80, 0xC0)))
    assert parse("[\x80-\u07ff]") == OneOf(frozenset(range(0xC2, 0xE0))) + tails
    assert parse("[\u1000-\ucfff]") == OneOf(frozenset(range(0xE1, 0xED))) + (tails + tails)


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        ("a" * 1999 + "b*", "a" * 2001),
        ("a{200}", "a{201}"),
        ("a{0,200}", "a{0,201}"),
        ("(" * 20 + "a" + ")" * 20, "(" * 21 + "a" + ")" * 21),
        ("(?:(a)(b))" * 30, "(a)(b)" + "(" * 21 + "a" + ")" * 21),
        (r"[\da-z]", r"[\d-z]"),
        (r"[a\w]", r"[a-\w]"),
        (r"[\w-]", r"[\w-z]"),
        ("[a-a]", r"[+-\d]"),
        ("[a-b]", r"[a-\D]"),
        ("[ab-c]", r"[\D-z]"),
    ],
)
def test_the_limits_of_a_pattern(largest, larger):
    parse(largest)
    with pytest.raises(ValueError, match="pattern "):
        parse(larger)


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_understood_is_refused_with_the_pattern(pattern):
    with pytest.raises(ValueError, match="pattern ") as raised:
        parse(pattern)
    assert repr(pattern) in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*a", "at character 1: put a backslash before"),
        ("ab$", "at character 3: put a backslash before"),
        ("a**", "at character 3: one repetition directly after another"),
        ("a{2}+", "at character 5: one repetition directly after another"),
    ],
)
def test_a_refusal_says_where(pattern, words):
    with pytest.raises(ValueError, match=words):
        parse(pattern)


def test_a_long_pattern_needs_no_deep_stack():
    text = "To be, or not to be, that is the question: " * 20
    assert accepts(build_dfa(parse(text)), text)


def test_expressions_are_simplified():
    a, b = (OneOf(frozenset(letter)) for letter in (b"a", b"b"))
    assert Nothing() + a == a + Nothing() == Nothing() and Empty() + a == a + Empty() == a
    assert (a + b) + a == a + (b + a) and Nothing() | a == a | Nothing() == a | a == a
    assert a | b == OneOf(frozenset(b"ab")) and (a + b | a) | b == Either(frozenset([a + b, a | b]))
    assert repr(a + b) == "Sequence(OneOf(frozenset({97})), OneOf(frozenset({98})))"
    assert [(a + b).size, (a + b | Repeat(a)).size, (a + b).alphabet] == [3, 6, frozenset(b"ab")]
    match [a + b, a + b | a, Repeat(a)]:
        case [Sequence(OneOf(allowed), second), Either(options), Repeat(body)]:
            assert (allowed, second, options, body) == (a.allowed, b, (a + b, a), a)
        case other:
            raise AssertionError(other)
    options = [Repeat(letter) for letter in (b, a + b, a, b + a, b)]
    either = reduce(or_, options)  # its options stand as they are written
    assert either == reduce(or_, options[::-1]) and either.options == (*options[:4],)


def test_a_pattern_with_too_many_states_is_refused():
    with pytest.raises(ValueError, match="more than 100 states"):
        build_dfa(parse("(a|b)*a(a|b){20}"), 100)


def test_a_mask_has_a_bit_for_each_of_many_tokens():
    index = TokenIndex("a+", [b"a" * (i + 1) for i in range(17)])
    assert index.mask(0) == 2**17 - 1


def test_an_index_that_cannot_be_met_is_refused():
    with pytest.raises(ValueError, match="no text that this vocabulary can spell"):
        TokenIndex("a1", [b"a", b"b", b""], 2)


def test_a_mask_becomes_a_tensor_bit_by_bit():
    for size in (1, 7, 8, 9, 67, 300):
        bits = [random.Random(size * 1000 + i).random() < 0.5 for i in range(size)]
        mask = sum(1 << i for i, bit in enumerate(bits) if bit)
        assert allowed(mask, size).tolist() == bits
    assert allowed(0b1101, 3).tolist() == [True, False, True], "what is beyond the logits is left out"
    assert allowed(0b1_0000_0001, 8).tolist() == [True] + [False] * 7


def test_a_processor_follows_the_output_wherever_it_goes():
    """Forward, back to an earlier output, and over to another: each time the mask is that of the output."""
    vocabulary = (b"a", b"b", b"ab", b"c", b"")
    processor = GrammarProcessor(regex_grammar("(ab)+c", vocabulary, 4))
    for output in ([], [2], [2, 2], [2], [0], [0, 1, 3], [0, 1, 3, 4], [0, 1], [], [2, 3]):
        grammar = RegexGrammar(TokenIndex("(ab)+c", vocabulary, 4))
        assert grammar.accept_tokens(output)
        row = [0]
        grammar.fill_bitmask(row, 0)
        kept = torch.isfinite(processor(output, torch.zeros(5))).tolist()
        assert kept == [bool(row[0] >> i & 1) for i in range(5)], output
    assert processor.validate([0, 1], [2, 3, 0]) == [2, 3] and processor.validate([], [3]) == []
    with pytest.raises(ValueError, match="does not allow"):
        processor([1], torch.zeros(5))


def test_requests_with_one_pattern_share_an_index():
    vocabulary = (b"a", b"")
    assert regex_grammar("a*", vocabulary, 1).index is (index := regex_grammar("a*", vocabulary, 1).index)
    assert regex_grammar("a", vocabulary, 1).index.trie is index.trie, "all patterns share the vocabulary"


def test_the_embedded_vocabulary_is_its_characters(shakespeare):
    tokenizer = shakespeare[1]
    assert tokenizer.token_bytes[:5] == (b"", b"", b"\n", b" ", b"!")
    assert all(len(data) == 1 for data in tokenizer.token_bytes[2:])


@pytest.mark.parametrize("prompt", ["O Romeo, ", "HAMLET:\n", "zzz ]]&", ""])
@pytest.mark.parametrize("pattern", [r"[A-Z]{4,9}:\n[A-Z][a-z ]{5,20}\.", r"(a|an|and) [b-d]+(!|\d)", "no"])
def test_the_embedded_model_writes_the_shape_whatever_the_prompt(shakespeare, prompt, pattern):
    """At a temperature of 2 each text that comes to its end matches, and no way leads to a digit."""
    model, tokenizer = shakespeare
    (eos,) = tokenizer.eos_token_ids
    for seed in range(3 if SOAK else 1):
        processor = GrammarProcessor(regex_grammar(pattern, tokenizer.token_bytes, eos))
        ids, output = tokenizer.encode(prompt) or [eos], []
        generator = torch.Generator().manual_seed(seed)
        while eos not in output:
            logits = processor(output, dense_logits(model, [*ids, *output])[-1] / 2)
            output.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
            if len(output) == 60:  # [b-d]+ has no last letter
                break
        text = tokenizer.decode(output)
        assert re.fullmatch(pattern, text) or (len(output) == 60 and re.fullmatch("an?d? [b-d]+", text)), text


# ------------------------------------------------------------------- SamplingParams.structured_outputs

guided = pytest.mark.skipif(not find_spec("llguidance"), reason="pip install 'mini-engine[structured]'")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}}
SCHEMA |= {"required": ["a", "b"], "additionalProperties": False}
TINY = tiny_model(vocab_size=257, dtype="float32")


def generate(shape, seeds=range(6), tokenizer=None, parts=None, **params):
    """Return the texts of a random model under a mask, at a temperature of 2."""
    engine = Engine(TINY, tokenizer or byte_tokenizer(), num_blocks=200, parts=parts)
    given = [
        SamplingParams(temperature=2, seed=seed, structured_outputs=shape, **{"max_tokens": 60} | params)
        for seed in seeds
    ]
    outputs = LLM.from_engine(engine).generate([[1, 2, 3]] * len(given), given, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@guided
@pytest.mark.parametrize("compact", [False, True])
def test_a_random_model_writes_json_of_a_schema(compact):
    shape = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=compact)
    answers = generate(shape, range(12))
    whole = [answer for answer in answers if answer.is_complete]
    assert len(whole) > 3 and all((a.finish_reason == "stop") >= a.is_complete for a in answers)
    for answer in whole:
        said = json.loads(answer.text)
        assert list(said) == ["a", "b"] and isinstance(said["a"], int) and said["b"] in ("x", None)
        if compact:
            assert answer.text == json.dumps(said, separators=(",", ":"))


def test_what_max_tokens_cuts_short_is_marked():
    """Four digits are whole without their end-of-text; three are not."""
    shape = {"regex": "[0-9]{4}"}
    assert [(a.finish_reason, a.is_complete) for a in generate(shape)] == [("stop", True)] * 6
    assert {(a.finish_reason, a.is_complete) for a in generate(shape, max_tokens=4)} == {("length", True)}
    assert {(a.finish_reason, a.is_complete) for a in generate(shape, max_tokens=3)} == {("length", False)}
    assert generate(None, [1])[0].is_complete is None


@pytest.mark.parametrize("installed", [pytest.param(True, marks=guided), False])
def test_regex_and_choice_need_no_library(installed, monkeypatch):
    if not installed:
        monkeypatch.setattr(guidance, "find_spec", lambda name: None)
    for answer in generate({"regex": "(ab|c)+[.]"}):
        assert re.fullmatch("(ab|c)+[.]", answer.text) or not answer.is_complete
    texts = ["a.b", "a+b|c", "(no)", "\\d^$"]
    said = {answer.text for answer in generate({"choice": texts}, range(40))}
    assert said <= set(texts) and len(said) > 2
    if not installed:
        with pytest.raises(
            ValueError, match=r"json needs llguidance \(pip install 'mini-engine\[structured\]"
        ):
            generate({"json": SCHEMA})


@guided
@pytest.mark.parametrize("pattern", ["(ab|ba)+", "[a-c]{3,9}x?", "([0-9][0-9]-){1,4}", "a|abc?"])
def test_both_grammars_are_one(pattern):
    """Masks, what is allowed, and rollback of llguidance and of our automata, over random walks."""
    tokenizer = byte_tokenizer()
    for seed in range(40):
        rng, num = random.Random(seed), 0
        ours = regex_grammar(pattern, tokenizer.token_bytes, 256)
        theirs = guidance.guidance_grammar("regex", pattern, tokenizer.json, 257, 256)
        for _ in range(30):
            rows = [0, 0]
            ours.fill_bitmask(rows, 0)
            theirs.fill_bitmask(rows, 1)
            assert rows[0] == rows[1] and ours.is_terminated() == theirs.is_terminated()
            known = [i for i in range(257) if rows[0] >> i & 1]
            ids = [
                rng.choice(known) if known and rng.random() < 0.9 else rng.randrange(257)
                for _ in range(rng.randint(0, 3))
            ]
            assert ours.validate_tokens(ids) == theirs.validate_tokens(ids)
            accepted = ours.accept_tokens(ids)
            assert theirs.accept_tokens(ids) == accepted
            num += len(ids) * accepted
            back = rng.randint(0, num) if rng.random() < 0.4 else 0
            ours.rollback(back)
            theirs.rollback(back)
            num -= back
        with pytest.raises(ValueError, match="num_tokens must be"):
            theirs.rollback(num + 1)


@guided
def test_a_grammar_is_compiled_once():
    guidance._matcher.cache_clear()
    generate({"json": SCHEMA}, range(8))
    assert guidance._matcher.cache_info().misses == 1


@guided
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"json": {"enum": []}}, "Unsatisfiable schema: anyOf is empty"),
        ({"json": {"type": "array", "minItems": 3, "maxItems": 1}}, "minItems .* greater than maxItems"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
        ({"regex": "("}, r"structured_outputs regex '\('.*unclosed group"),
    ],
)
def test_a_shape_that_cannot_be_met_is_refused_on_input(shape, words):
    with pytest.raises(ValueError, match=f"request 'r0': .*{words}"):
        generate(shape)


def test_what_structured_outputs_need():
    engine = Engine(TINY, num_blocks=20)
    with pytest.raises(ValueError, match="'a': structured_outputs needs a tokenizer; this engine has none"):
        engine.add_request([1], SamplingParams(structured_outputs={"regex": "a"}), request_id="a")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_ids = ()
    with pytest.raises(ValueError, match="a tokenizer with an end-of-text token"):
        generate({"regex": "a"}, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="ignore_eos must be False with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_of_several_ends_the_first_counts():
    params, vocabulary = StructuredOutputsParams(regex="a"), (b"a", b"", b"")
    tokenizer = SimpleNamespace(vocab_size=3, eos_token_ids=(1, 2), token_bytes=vocabulary, json="")
    assert structured_grammar(params, tokenizer, lambda *given: given) == ("a", vocabulary, 1)


def test_a_grammar_of_a_lab_serves_regex_and_choice():
    asked = []

    def grammar(pattern, vocabulary, eos_token_id):
        asked.append((pattern, eos_token_id))
        return regex_grammar(pattern, vocabulary, eos_token_id)

    assert generate({"choice": ["a.b"]}, [1], parts=Parts(grammar=grammar))[0].text == "a.b"
    assert asked == [(r"a\.b", 256)]


@pytest.mark.soak
def test_a_chat_model_writes_dates_and_objects(smollm2_path):
    """SmolLM2, greedy, at prompts that ask for something else."""
    model, tokenizer = load(str(smollm2_path), "float32", "cpu")
    llm, eos = LLM.from_engine(Engine(model, tokenizer)), tokenizer.eos_token_ids[0]
    for pattern in (r"\d{4}-[01]\d-[0-3]\d", r'\{"name": "[a-zé]{2,9}", "age": [1-9]\d?\}'):
        processor = GrammarProcessor(regex_grammar(pattern, tokenizer.token_bytes, eos))
        params = SamplingParams(max_tokens=50, logits_processors=[processor])
        [said] = llm.chat([[{"role": "user", "content": "Write a poem about the sea."}]], params)
        assert said.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, said.outputs[0].text), pattern


def test_the_bytes_of_a_chat_models_tokens_are_its_texts(smollm2_path):
    """All tokens of random texts, joined, are the bytes of the text; special tokens have none."""
    tokenizer = load_tokenizer(smollm2_path)
    for text in ("Hello, world", "naïve — 東京 😀\n\tx", " a  b", "\u0001\u007f\u00ad"):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    assert {tokenizer.token_bytes[i] for i in tokenizer.special_token_ids} == {b""}
