"""Grammars for the tokenizer of one model: compiled once each, followed by any number of sequences."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import addressof, create_string_buffer
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide
from decant.engine.guides.limits import PARSER_LIMITS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_GRAMMARS = 128
"""Compiled grammars that are kept; running sequences keep theirs in any case."""
COMPILE_LIMIT = "a grammar that can be compiled and begun"
TOO_MANY_STATES = "too many states"
"""In the error of a matcher whose lexer has no state left: those of all outputs of the grammar count."""
MAX_MASK_THREADS = 4
_LENGTHS = ("{1,2}", "{1,4}", "{1,6}", "{1,8}", "{1,12}", "{1,16}", "{1,24}", "{1,32}", "+")
SLICES = (r"[\x20\x0A\x0D\x09]+", *(rf'[^"\\\x00-\x1F\x7F]{length}' for length in _LENGTHS))
"""Sets of tokens, each without those before it. A mask takes a set as a whole where all of its texts may follow, as in
JSON strings; of the others it tries each token. More sets than the library's own four: less to try near the end of a
string with ``maxLength``, which is where masks take the longest.
"""
STACK_BYTES = 64 << 20
"""Of the thread that compiles: the library recurses through a grammar's rules, and a full stack ends the process. The
router has compiled the grammar before, with a stack of a fraction of this."""


class Grammar:
    """Grammar of a guide. ``prepare`` compiles it; ``new_matcher`` does so too where it was not called."""

    def __init__(self, guide: Guide, compiler: GrammarCompiler) -> None:
        self.guide = guide
        self.compiler = compiler
        self._lock = threading.Lock()
        self._matcher: LLMatcher | None = None
        self._error: InvalidRequest | None = None
        self.first_mask = b""
        """Packed bits of the tokens that may come first, once it is compiled."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and other.guide == self.guide

    def __hash__(self) -> int:
        return hash(self.guide)

    def prepare(self) -> None:
        """Compile the grammar, in any thread. Raises InvalidRequest, each time."""
        with self._lock:
            if self._matcher is None and self._error is None:
                try:
                    self._matcher, self.first_mask = self.compiler.compile(self.guide)
                except InvalidRequest as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def new_matcher(self) -> LLMatcher:
        """Matcher at the begin of an output. Raises InvalidRequest.

        All of them share one lexer, whose states are kept, up to a limit: then ``renew`` replaces it.
        """
        self.prepare()
        assert self._matcher is not None
        return self._matcher.deep_copy()

    def renew(self) -> LLMatcher:
        """Matcher at the begin of an output, and those of later outputs, with a lexer that has no states yet."""
        self._matcher, _ = self.compiler.compile(self.guide)
        return self._matcher.deep_copy()


class MaskThread:
    """Thread that computes masks beside a step; it starts with the first.

    It is a daemon: a process ends also while a grammar keeps it.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Callable[[], None] | None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        if self._works is None:
            self._works = SimpleQueue()
            threading.Thread(target=_run_all, args=(self._works,), name="masks", daemon=True).start()
        self._works.put(work)

    def replace(self) -> None:
        """Use another thread from now on: this one does not return, or has failed."""
        if self._works is not None:
            self._works.put(None)
        self._works = None


def _run_all(works: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := works.get()) is not None:
        work()


class GrammarCompiler:
    """Compiler for the tokenizer of a file ``tokenizer.json``, of which any method may be called from any thread.

    Making one takes about a second for a vocabulary of 150,000 tokens, and holds the interpreter's lock. ``refusal`` is
    why outputs of this model can't be guided, empty if they can.
    """

    def __init__(self, tokenizer: Path, vocabulary: int, eos: frozenset[int]) -> None:
        self.eos = eos
        self.refusal = ""
        self._tokenizer: Any = None
        self._grammars: OrderedDict[Guide, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.mask_thread = MaskThread()
        self._executor: LLExecutor | None = None
        if not eos:
            self.refusal = "a model with an end token"
            return
        from llguidance import LLTokenizer

        try:
            self._tokenizer = LLTokenizer(
                str(tokenizer), n_vocab=vocabulary, eos_token=sorted(eos), slices=list(SLICES)
            )
        except BaseException as error:  # the library's panics derive from it
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self.refusal = f"a model with another tokenizer ({error})"

    def grammar(self, guide: Guide) -> Grammar:
        """Grammar of a guide, compiled or not. Raises InvalidRequest if this model's outputs can't be guided."""
        if self.refusal:
            raise InvalidRequest(guide.field, self.refusal, "a guide")
        with self._lock:
            grammar = self._grammars.get(guide)
            if grammar is None:
                grammar = self._grammars[guide] = Grammar(guide, self)
                if len(self._grammars) > MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(guide)
        return grammar

    def prepare(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar in a thread of its own. The future raises InvalidRequest."""
        if self._threads is None:
            before = threading.stack_size(STACK_BYTES)
            self._threads = ThreadPoolExecutor(1, "grammars")
            self._threads.submit(int).result()  # starts the thread
            threading.stack_size(before)
        return self._threads.submit(grammar.prepare)

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.tokenize_str(text)
        return tokens

    def masks(self, matchers: Sequence[LLMatcher], tokens: Sequence[int]) -> list[bytes]:
        """Have each matcher consume one token, and compute the mask behind it, without the interpreter's lock."""
        from llguidance import LLExecutor

        if self._executor is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self._executor = LLExecutor(max(1, min(MAX_MASK_THREADS, cores // 2)))
        self._executor.consume_token_par(list(zip(matchers, tokens, strict=True)))
        size = 4 * -(-self._tokenizer.vocab_size // 32)
        memory = create_string_buffer(size * len(matchers))
        places = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, addressof(memory), size, len(matchers))
        packed = memory.raw
        return [packed[begin : begin + size] for begin in range(0, len(packed), size)]

    def compile(self, guide: Guide) -> tuple[LLMatcher, bytes]:
        """Matcher at the begin of an output, and its mask. Raises InvalidRequest."""
        from llguidance import LLMatcher, LLParserLimits

        limits: Any = PARSER_LIMITS
        matcher = LLMatcher(self._tokenizer, guide.matcher_grammar(), log_level=0, limits=LLParserLimits(**limits))
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(guide.field, COMPILE_LIMIT, matcher.get_error().partition("\n<")[0])
        if not any(mask):
            raise InvalidRequest(guide.field, COMPILE_LIMIT, "one that no text matches")
        return matcher, mask
