"""Embeddings of stock clients, OpenAI's and LangChain's, from a running server of tests/fixtures/embeddings: one line for
each check.

The fixture's tokenizer has a token for each byte and ends each text with another.
"""

import base64
import json
import math
import struct
from pathlib import Path

import langchain_core
import langchain_openai
import openai
import tiktoken
from client_checks import KEY, options, run

FIXTURE = Path(__file__).resolve().parent.parent / "tests/fixtures/embeddings"


def far(a, b):
    assert len(a) == len(b), (len(a), len(b))
    return max(abs(x - y) for x, y in zip(a, b))


class Checks:
    """Its methods are the checks; each returns what is printed."""

    def __init__(self, url):
        self._url = url
        self._client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
        self._model = self._client.models.list().data[0].id
        expected = json.loads((FIXTURE / "expected.json").read_text())
        self._texts = [one for one in expected if "text" in one]

    def _embed(self, content, **more):
        return self._client.embeddings.create(model=self._model, input=content, **more)

    def _langchain(self, **more):
        return langchain_openai.OpenAIEmbeddings(
            base_url=self._url + "/v1", api_key=KEY, model=self._model, max_retries=0, **more
        )

    def openai_texts(self):
        reply = self._embed([one["text"] for one in self._texts])
        worst = max(far(data.embedding, one["embedding"]) for data, one in zip(reply.data, self._texts))
        assert worst < 1e-4, worst
        tokens = sum(len(one["ids"]) for one in self._texts)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == tokens, reply.usage
        return f"{worst:.1e} from sentence-transformers, {tokens} tokens"

    def openai_forms(self):
        one = self._texts[1]
        text = self._embed(one["text"]).data[0].embedding
        raw = self._embed(one["text"], encoding_format="base64").data[0].embedding
        values = self._embed(one["text"], encoding_format="float").data[0].embedding
        data = base64.b64decode(raw)
        # The client asks for base64 where nothing is said, and reads it.
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == text
        assert far(values, text) < 1e-7
        assert self._embed(one["ids"]).data[0].embedding == text
        assert self._embed([one["ids"]]).data[0].embedding == text
        return "text, ids, float and base64 are the same"

    def openai_dimensions(self):
        one = self._texts[0]
        cut = self._embed(one["text"], dimensions=8).data[0].embedding
        scale = math.sqrt(sum(x * x for x in one["embedding"][:8]))
        assert far(cut, [x / scale for x in one["embedding"][:8]]) < 1e-4
        try:
            self._embed(one["text"], dimensions=49)
        except openai.BadRequestError as error:
            assert error.param == "dimensions", error
            return f"{len(cut)} of 48"
        raise AssertionError("accepted")

    def openai_many_texts(self):
        reply = self._embed([f"text {i}" for i in range(1000)])
        assert [data.index for data in reply.data] == list(range(1000))
        assert reply.data[7].embedding == self._embed("text 7").data[0].embedding
        return f"{len(reply.data)} texts, {reply.usage.prompt_tokens} tokens"

    def openai_too_long(self):
        try:
            self._embed("a b " * 900)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded" and error.param == "input", error
            return error.code
        raise AssertionError("accepted")

    def langchain_texts(self):
        embeddings = self._langchain(check_embedding_ctx_length=False)
        texts = [one["text"] for one in self._texts]
        worst = max(far(e, one["embedding"]) for e, one in zip(embeddings.embed_documents(texts), self._texts))
        assert worst < 1e-4, worst
        assert far(embeddings.embed_query(texts[2]), self._texts[2]["embedding"]) < 1e-4
        short = self._langchain(check_embedding_ctx_length=False, dimensions=16).embed_query(texts[2])
        return f"{worst:.1e} from sentence-transformers, {len(short)} dimensions"

    def langchain_token_ids(self):
        """By default it sends the ids of cl100k_base, which is downloaded; here another tokenizer stands for it."""
        spare = {bytes([b]): b for b in range(256)}
        tokens = {"far": 1000, "near": 0}
        seen = []

        def stand_in(offset):
            ranks = {byte: id + offset for byte, id in spare.items()}
            return lambda _: tiktoken.Encoding(name="x", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={})

        usual = tiktoken.get_encoding
        try:
            for name, offset in tokens.items():
                tiktoken.get_encoding = stand_in(offset)
                try:
                    vector = self._langchain().embed_query("abc")
                    ids = self._embed([97, 98, 99]).data[0].embedding
                    assert far(vector, ids) < 1e-7
                    seen.append(f"{name} ids: as they are")
                except openai.BadRequestError as error:
                    assert error.param == "input" and "check_embedding_ctx_length=False" in error.message, error
                    seen.append(f"{name} ids: told what to set")
        finally:
            tiktoken.get_encoding = usual
        assert len(seen) == 2 and seen[0].endswith("set") and seen[1].endswith("are"), seen
        return ", ".join(seen)


def main():
    asked = options()
    title = f"openai {openai.__version__}, langchain-core {langchain_core.__version__}: embeddings"
    run(title, Checks(asked.url), asked.short)


if __name__ == "__main__":
    main()
