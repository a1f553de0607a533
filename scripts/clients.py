"""Stock clients against a running server: one line for each check.

The server at --url needs the key `secret`; the one at --reasoning-url has a reasoning parser for which all text of a
model that does not reason is reasoning.
"""

import json
import pathlib
import re
import tomllib

import anthropic
import openai
import yaml
from client_checks import KEY, PROMPT, SCHEMA, Person, check_city, options, run, user

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "schema": SCHEMA,
}
RESPONSES_TOOL = {
    "type": "function",
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "parameters": WEATHER["schema"],
    "strict": True,
}
MESSAGES_TOOL = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["schema"],
}


class Checks:
    """Its methods are the checks; each returns what is printed."""

    def __init__(self, url, reasoning_url):
        self._openai = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
        self._anthropic = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        self._openai_reasoning = openai.OpenAI(
            base_url=reasoning_url + "/v1", api_key=KEY, max_retries=0
        )
        self._anthropic_reasoning = anthropic.Anthropic(
            base_url=reasoning_url, api_key=KEY, max_retries=0
        )
        self._model = self._openai.models.list().data[0].id

    def _chat(self, content, **options):
        options.setdefault("max_tokens", 24)
        reply = self._openai.chat.completions.create(
            model=self._model, messages=[user(content)], temperature=0, **options
        )
        return reply.choices[0].message.content

    def _respond(self, method="create", **options):
        options.setdefault("input", PROMPT)
        options.setdefault("max_output_tokens", 24)
        method = getattr(self._openai.responses, method)
        return method(model=self._model, temperature=0, **options)

    def _message(self, method="create", **options):
        options.setdefault("messages", [user(PROMPT)])
        options.setdefault("max_tokens", 24)
        options.setdefault("extra_body", {"temperature": 0})
        method = getattr(self._anthropic.messages, method)
        return method(model=self._model, **options)

    # The files of docs/clients.md.

    def documented_files(self):
        text = (pathlib.Path(__file__).parent.parent / "docs/clients.md").read_text()
        readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
        blocks = re.findall(r"^```(json|toml|yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        files = [readers[form](block) for form, block in blocks]
        # As Continue's schema and Zed's settings require it.
        [extension] = [file for file in files if file.get("schema") == "v1"]
        assert {"name", "version", "schema"} <= extension.keys()
        assert all({"name", "provider", "model"} <= model.keys() for model in extension["models"])
        [editor] = [file["language_models"] for file in files if "language_models" in file]
        [provider] = editor["openai_compatible"].values()
        [model] = provider["available_models"]
        assert {"name", "max_tokens", "capabilities"} <= model.keys()
        assert model["capabilities"].keys() == {"tools", "images", "parallel_tool_calls", "prompt_cache_key"}
        return f"{len(files)} files"

    # OpenAI's Responses API.

    def responses_text(self):
        reply = self._respond()
        assert reply.output_text == self._chat(PROMPT), reply
        assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
        assert reply.usage.output_tokens == 24 and reply.store is True
        return reply.output_text[:40]

    def responses_items_and_instructions(self):
        items = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
        reply = self._respond(instructions="Be brief.", input=items)
        chat = self._openai.chat.completions.create(
            model=self._model,
            messages=[{"role": "system", "content": "Be brief."}, user(PROMPT)],
            temperature=0,
            max_tokens=24,
        )
        assert reply.output_text == chat.choices[0].message.content
        assert reply.usage.input_tokens == chat.usage.prompt_tokens
        return f"{reply.usage.input_tokens} input tokens, as the chat"

    def responses_stream_of_create(self):
        text, numbers, last = "", [], None
        for event in self._respond(stream=True):
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
            last = event
        assert numbers == list(range(len(numbers))), numbers
        assert last.type == "response.incomplete" and last.response.output_text == text
        assert text == self._chat(PROMPT)
        return f"{len(numbers)} events"

    def responses_stream_helper(self):
        """Long."""
        with self._respond("stream", max_output_tokens=200) as stream:
            kinds = {}
            for event in stream:
                kinds[event.type] = kinds.get(event.type, 0) + 1
            reply = stream.get_final_response()
        assert reply.output_text == self._chat(PROMPT, max_tokens=200)
        assert kinds["response.output_text.done"] == kinds["response.completed"] == 1, kinds
        return f"{sum(kinds.values())} events of {len(kinds)} kinds"

    def responses_tools(self):
        """Long."""
        asked = dict(tools=[RESPONSES_TOOL], max_output_tokens=200, parallel_tool_calls=False)
        question = user("What is the weather in Paris?")
        reply = self._respond(input=[question], tool_choice="required", **asked)
        (call,) = reply.output
        assert call.type == "function_call" and reply.status == "completed", reply
        check_city(json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        # The client's own objects come back, as its documentation shows.
        reply = self._respond(input=[question, *reply.output, result], **asked)
        assert reply.output_text, reply
        return f"{call.arguments} -> {reply.output_text[:40]!r}"

    def responses_tool_of_choice_streamed(self):
        choice = {"type": "function", "name": WEATHER["name"]}
        with self._respond(
            "stream", tools=[RESPONSES_TOOL], tool_choice=choice, max_output_tokens=200
        ) as stream:
            deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            reply = stream.get_final_response()
        (call,) = reply.output
        assert call.arguments == "".join(deltas)
        check_city(json.loads(call.arguments))
        return f"{len(deltas)} deltas: {call.arguments}"

    def responses_parse(self):
        reply = self._respond("parse", input="Invent a person.", text_format=Person, max_output_tokens=200)
        assert isinstance(reply.output_parsed, Person), reply
        return repr(reply.output_parsed)

    def responses_parse_streamed(self):
        with self._respond(
            "stream", input="Invent a person.", text_format=Person, max_output_tokens=200
        ) as stream:
            for _ in stream:
                pass
            reply = stream.get_final_response()
        assert isinstance(reply.output_parsed, Person), reply
        return repr(reply.output_parsed)

    def responses_json_object(self):
        """Long."""
        reply = self._respond(
            input="Answer with a JSON object.", text={"format": {"type": "json_object"}}, max_output_tokens=400
        )
        if reply.status == "completed":
            assert isinstance(json.loads(reply.output_text), dict)
        assert reply.output_text.startswith("{")
        return f"{reply.status}: {reply.output_text[:40]!r}"

    def responses_reasoning(self):
        client = self._openai_reasoning.responses
        reply = client.create(model=self._model, input=PROMPT, temperature=0, max_output_tokens=24)
        thought = reply.output[0]
        assert thought.type == "reasoning", reply
        assert reply.usage.output_tokens_details.reasoning_tokens == 24, reply.usage
        events = list(
            client.create(
                model=self._model, input=PROMPT, temperature=0, max_output_tokens=24, stream=True
            )
        )
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        final = events[-1].response
        assert "".join(deltas) == thought.content[0].text == final.output[0].content[0].text
        return f"{len(deltas)} deltas"

    def responses_extra_fields(self):
        reply = self._respond(extra_body={"spec_length": 0, "top_k": 5, "seed": 3, "stop": ["\n"]})
        assert "\n" not in reply.output_text
        return repr(reply.output_text[:40])

    def responses_stored(self):
        responses = self._openai.responses
        first = self._respond()
        assert responses.retrieve(first.id).output_text == first.output_text
        second = self._respond(input="And?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.input_tokens, second.usage
        responses.delete(first.id)
        try:
            responses.retrieve(first.id)
        except openai.NotFoundError as error:
            return error.body["message"][:40]
        raise AssertionError("it was told again")

    def responses_refusals(self):
        seen = []
        for field, value in [
            ("previous_response_id", "resp_1"),
            ("background", True),
            ("tool_choice", {"type": "web_search"}),
        ]:
            try:
                self._respond(**{field: value})
            except openai.BadRequestError as error:
                assert error.param.startswith(field), error
                seen.append(error.param)
            else:
                raise AssertionError(f"{field} was accepted")
        return ", ".join(seen)

    # Anthropic's Messages API.

    def messages_text(self):
        reply = self._message()
        assert reply.content[0].text == self._chat(PROMPT), reply
        assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == 24
        return reply.content[0].text[:40]

    def messages_system_and_count(self):
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        reply = self._message(system=system)
        counted = self._anthropic.messages.count_tokens(
            model=self._model, system=system, messages=[user(PROMPT)]
        )
        usage = reply.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, usage
        return f"{counted.input_tokens} input tokens, {usage.cache_read_input_tokens} cached"

    def messages_stream_of_create(self):
        kinds = [event.type for event in self._message(stream=True)]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
        return f"{len(kinds)} events"

    def messages_stream_helper(self):
        """Long."""
        with self._message("stream", max_tokens=200) as stream:
            text = "".join(stream.text_stream)
            reply = stream.get_final_message()
        assert reply.content[0].text == text == self._chat(PROMPT, max_tokens=200)
        assert reply.stop_reason == "end_turn" and reply.usage.output_tokens > 0, reply
        return f"{reply.usage.output_tokens} tokens, {reply.stop_reason}"

    def messages_tools(self):
        """Long."""
        asked = dict(tools=[MESSAGES_TOOL], max_tokens=200)
        question = user("What is the weather in Paris?")
        reply = self._message(messages=[question], tool_choice={"type": "any"}, **asked)
        call = reply.content[0]
        assert call.type == "tool_use" and reply.stop_reason == "tool_use", reply
        check_city(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
        # The client's own objects come back, as its documentation shows.
        turns = [question, {"role": "assistant", "content": reply.content[:1]}, user([result])]
        reply = self._message(messages=turns, **asked)
        assert reply.content[0].type == "text", reply
        return f"{call.input} -> {reply.content[0].text[:40]!r}"

    def messages_tool_of_choice_streamed(self):
        choice = {"type": "tool", "name": WEATHER["name"]}
        with self._message("stream", tools=[MESSAGES_TOOL], tool_choice=choice, max_tokens=200) as stream:
            deltas = [e.partial_json for e in stream if e.type == "input_json"]
            reply = stream.get_final_message()
        (call,) = reply.content
        check_city(call.input)
        assert call.input == json.loads("".join(deltas)) and reply.stop_reason == "tool_use"
        return f"{len(deltas)} deltas: {call.input}"

    def messages_parse(self):
        reply = self._message(
            "parse", messages=[user("Invent a person.")], output_format=Person, max_tokens=200
        )
        assert isinstance(reply.parsed_output, Person), reply
        return repr(reply.parsed_output)

    def messages_stop_sequence(self):
        reply = self._message(stop_sequences=["\n"], max_tokens=200)
        assert reply.stop_reason == "stop_sequence" and reply.stop_sequence == "\n", reply
        return repr(reply.content[0].text[:40])

    def messages_thinking(self):
        asked = dict(
            model=self._model,
            messages=[user(PROMPT)],
            max_tokens=24,
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"temperature": 0},
        )
        reply = self._anthropic_reasoning.messages.create(**asked)
        thought = reply.content[0]
        assert thought.type == "thinking", reply
        with self._anthropic_reasoning.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert final.content[0].thinking == thought.thinking
        return repr(thought.thinking[:40])

    def messages_errors(self):
        seen = []
        for client, options, expected in [
            (self._anthropic, {"max_tokens": -1}, anthropic.BadRequestError),
            (self._anthropic, {"model": "other"}, anthropic.NotFoundError),
            (self._anthropic.with_options(api_key="wrong"), {}, anthropic.AuthenticationError),
            (self._anthropic, {"messages": [user("a b " * 9000)]}, anthropic.BadRequestError),
        ]:
            asked = dict(model=self._model, max_tokens=5, messages=[user(PROMPT)]) | options
            try:
                client.messages.create(**asked)
            except expected as error:
                assert error.body["type"] == "error", error.body
                seen.append(error.body["error"]["type"])
            else:
                raise AssertionError(f"{options} were accepted")
        return ", ".join(seen)


def main():
    asked = options("reasoning-url")
    title = f"openai {openai.__version__}, anthropic {anthropic.__version__}"
    run(title, Checks(asked.url, asked.reasoning_url), asked.short)


if __name__ == "__main__":
    main()
