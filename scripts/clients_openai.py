"""Stock Python clients of chats and completions against a running server: OpenAI's, LangChain's, Pydantic AI's."""

import json

import langchain_core
import langchain_openai
import openai
import pydantic_ai
from client_checks import KEY, PROMPT, SCHEMA, Person, check_city, options, run, user
from langchain_core.tools import tool
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA, "strict": True},
}
WEATHER = "What is the weather in Paris?"


@tool
def get_weather(city: str, unit: str) -> str:
    """The weather in a city."""
    return f"18 degrees {unit} in {city}"


class Checks:
    """Its methods are the checks; each returns what is printed."""

    def __init__(self, url):
        self._openai = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
        self._model = self._openai.models.list().data[0].id
        self._url = url

    def _chat(self, content=PROMPT, method="create", **asked):
        asked.setdefault("max_tokens", 24)
        asked.setdefault("temperature", 0)
        method = getattr(self._openai.chat.completions, method)
        return method(model=self._model, messages=[user(content)], **asked)

    def _complete(self, prompt="The sky is", **asked):
        asked.setdefault("max_tokens", 16)
        asked.setdefault("temperature", 0)
        return self._openai.completions.create(model=self._model, prompt=prompt, **asked)

    def _ids(self, text):
        """Token ids of a text, as the server has them."""
        reply = self._complete(text, echo=True, max_tokens=0, extra_body={"return_token_ids": True})
        return reply.choices[0].prompt_token_ids

    def _langchain(self, **asked):
        asked.setdefault("max_tokens", 24)
        return langchain_openai.ChatOpenAI(
            base_url=self._url + "/v1", api_key=KEY, model=self._model, temperature=0, max_retries=0, **asked
        )

    def _agent(self, **asked):
        provider = OpenAIProvider(base_url=self._url + "/v1", api_key=KEY)
        model = OpenAIChatModel(self._model, provider=provider)
        return Agent(model, model_settings={"temperature": 0, "max_tokens": 200}, retries=0, **asked)

    # OpenAI's client.

    def chat_streamed(self):
        whole = self._chat()
        chunks = list(
            self._chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        counts = [c.usage.completion_tokens for c in chunks]
        assert counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens, counts
        return f"{len(chunks)} chunks with usage"

    def chat_tools_streamed(self):
        """Long."""
        with self._chat(
            WEATHER, "stream", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200
        ) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
        (call,) = choice.message.tool_calls
        check_city(json.loads(call.function.arguments))
        assert choice.finish_reason == "tool_calls", choice
        return call.function.arguments

    def chat_parse(self):
        reply = self._chat("Invent a person.", "parse", response_format=Person, max_tokens=100)
        assert isinstance(reply.choices[0].message.parsed, Person), reply
        return repr(reply.choices[0].message.parsed)

    def chat_logprobs(self):
        reply = self._chat(logprobs=True, top_logprobs=2, max_tokens=4)
        content = reply.choices[0].logprobs.content
        assert len(content) == 4 and all(len(token.top_logprobs) == 2 for token in content)
        return " ".join(repr(token.token) for token in content)

    def completion_best_of(self):
        asked = dict(prompt="Once", temperature=1, seed=5, logprobs=0)
        all_of_them = self._complete(n=4, **asked)
        best = self._complete(n=1, extra_body={"best_of": 4}, **asked)

        def mean(choice):
            of = choice.logprobs.token_logprobs
            return sum(of) / len(of)

        expected = max(all_of_them.choices, key=mean)
        assert best.choices[0].text == expected.text and len(best.choices) == 1
        assert best.usage.completion_tokens == all_of_them.usage.completion_tokens
        return f"{mean(expected):.2f} is the best of {', '.join(f'{mean(c):.2f}' for c in all_of_them.choices)}"

    def completion_echo_and_ids(self):
        reply = self._complete(echo=True, logprobs=1, max_tokens=2, extra_body={"return_token_ids": True})
        (choice,) = reply.choices
        assert choice.text.startswith("The sky is") and len(choice.token_ids) == 2
        assert len(choice.logprobs.tokens) == len(choice.prompt_token_ids) + 2
        return f"{choice.prompt_token_ids} + {choice.token_ids}"

    def completion_integers_with_a_point(self):
        body = {"top_k": 5.0, "min_tokens": 1.0, "spec_length": 2.0}
        reply = self._complete(max_tokens=4.0, seed=3.0, n=1.0, extra_body=body)
        return f"{reply.usage.completion_tokens} tokens"

    def completion_allowed_token_ids(self):
        ids = self._ids(" yes no")
        reply = self._complete(extra_body={"allowed_token_ids": ids, "return_token_ids": True})
        assert set(reply.choices[0].token_ids) <= set(ids), reply
        return repr(reply.choices[0].text)

    def completion_bad_words(self):
        free = self._complete().choices[0].text
        word = next(word for word in free.split() if word.isalpha())
        changed = self._complete(extra_body={"bad_words": [word]}).choices[0].text
        assert word in free.split() and word not in changed.split(), (free, changed)
        return f"without {word!r}: {changed!r}"

    def completion_stop_included(self):
        free = self._complete().choices[0].text
        stop = free.strip()[4:7]
        asked = dict(stop=stop, extra_body={"include_stop_str_in_output": True})
        (choice,) = self._complete(**asked).choices
        assert choice.text == free[: free.index(stop) + len(stop)], (free, choice)
        return repr(choice.text)

    def completion_prompt_truncated(self):
        body = {"truncate_prompt_tokens": 3, "return_token_ids": True}
        reply = self._complete("a b c d e f g", max_tokens=1, extra_body=body)
        assert reply.usage.prompt_tokens == 3
        assert reply.choices[0].prompt_token_ids == self._ids("a b c d e f g")[-3:]
        return f"{reply.choices[0].prompt_token_ids}"

    def too_long_is_recognized(self):
        try:
            self._chat("a b " * 9000)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            return error.code
        raise AssertionError("accepted")

    def unsupported_is_named(self):
        try:
            self._complete(suffix="end")
        except openai.BadRequestError as error:
            assert error.param == "suffix", error
            return str(error.body["message"])[:70]
        raise AssertionError("accepted")

    # LangChain's.

    def langchain_invoke_and_stream(self):
        model = self._langchain(stream_usage=True)
        whole = model.invoke(PROMPT)
        parts = list(model.stream(PROMPT))
        assert "".join(part.content for part in parts) == whole.content
        counted = sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata)
        assert counted == whole.usage_metadata["output_tokens"], (counted, whole)
        return f"{len(parts)} parts, {counted} tokens"

    def langchain_tools(self):
        model = self._langchain(max_tokens=200).bind_tools([get_weather], tool_choice="any")
        (call,) = model.invoke(WEATHER, parallel_tool_calls=False).tool_calls
        assert call["name"] == "get_weather" and set(call["args"]) == {"city", "unit"}, call
        return repr(call["args"])[:70]

    def langchain_structured_output(self):
        model = self._langchain(max_tokens=100).with_structured_output(Person, method="json_schema")
        return repr(model.invoke("Invent a person."))

    def langchain_too_long(self):
        try:
            self._langchain().invoke("a b " * 9000)
        except openai.BadRequestError as error:
            # What its fallbacks and summaries wait for; it looks for the code in the message.
            assert type(error).__name__ == "OpenAIContextOverflowError", repr(error)
            assert error.code == "context_length_exceeded", error
            return type(error).__name__
        raise AssertionError("accepted")

    def langchain_batch_of_completions(self):
        model = langchain_openai.OpenAI(
            base_url=self._url + "/v1", api_key=KEY, model=self._model, temperature=0, max_tokens=8, max_retries=0
        )
        texts = model.batch(["The sky is", "Once upon a"])
        assert texts[0] == self._complete(max_tokens=8).choices[0].text
        return repr(texts)

    # Pydantic AI's.

    def pydantic_ai_text(self):
        result = self._agent().run_sync(PROMPT)
        return f"{result.usage.output_tokens} tokens"

    def pydantic_ai_structured_output(self):
        return repr(self._agent(output_type=NativeOutput(Person)).run_sync("Invent a person.").output)

    def pydantic_ai_tool_output(self):
        """Long."""
        return repr(self._agent(output_type=Person).run_sync("Invent a person.").output)


def main():
    asked = options()
    versions = {"openai": openai, "langchain-core": langchain_core, "pydantic-ai": pydantic_ai}
    title = ", ".join(f"{name} {module.__version__}" for name, module in versions.items())
    run(title, Checks(asked.url), asked.short)


if __name__ == "__main__":
    main()
