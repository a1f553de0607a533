"""Ollama's client against a running server: one line for each check.

The server at --url needs the key `secret`; the one at --reasoning-url has a reasoning parser for which all text of a
model that does not reason is reasoning; the one at --embeddings-url needs the key, too, and has a model for embeddings.
"""

import json
from importlib.metadata import version

import ollama
from client_checks import KEY, PROMPT, SCHEMA, Person, check_city, options, run, user

GREEDY = {"temperature": 0, "num_predict": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {key: SCHEMA[key] for key in ("type", "properties", "required")},
    },
}


class Checks:
    """Its methods are the checks; each returns what is printed."""

    def __init__(self, url, reasoning_url, embeddings_url):
        headers = {"Authorization": f"Bearer {KEY}"}
        self._client = ollama.Client(host=url, headers=headers)
        self._reasoning = ollama.Client(host=reasoning_url, headers=headers)
        self._embeddings = ollama.Client(host=embeddings_url, headers=headers)
        self._model = self._client.list().models[0].model

    def models(self):
        model = self._client.list().models[0]
        assert model.model.endswith(":latest") and model.details.format == "gguf", model
        shown = self._client.show(self._model)
        assert "completion" in shown.capabilities and "tools" in shown.capabilities, shown
        family = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{family}.context_length"] > 0, shown.modelinfo
        running = self._client.ps().models[0]
        assert running.digest == model.digest and running.expires_at.year > 2100, running
        details = model.details
        return f"{model.model}, {details.family}, {details.parameter_size}, {details.quantization_level}"

    def pull(self):
        assert self._client.pull(self._model).status == "success"
        statuses = [line.status for line in self._client.pull(self._model, stream=True)]
        assert statuses[-1] == "success", statuses
        return ", ".join(statuses)

    def chat_whole_and_streamed(self):
        asked = {"model": self._model, "messages": [user(PROMPT)], "options": GREEDY}
        whole = self._client.chat(**asked)
        assert whole.done and whole.done_reason == "length" and whole.eval_count == 24, whole
        text = "".join(part.message.content for part in self._client.chat(**asked, stream=True))
        assert text == whole.message.content, (text, whole)
        return f"{whole.prompt_eval_count} + {whole.eval_count} tokens in {whole.total_duration / 1e6:.0f} ms"

    def generate_whole_and_streamed(self):
        for raw in (False, True):
            asked = {"model": self._model, "prompt": PROMPT, "options": GREEDY, "raw": raw}
            whole = self._client.generate(**asked)
            text = "".join(part.response for part in self._client.generate(**asked, stream=True))
            assert text == whole.response and text, (text, whole)
        return text[:40]

    def load_and_unload(self):
        loaded = self._client.generate(model=self._model)
        unloaded = self._client.generate(model=self._model, keep_alive=0)
        assert (loaded.done_reason, unloaded.done_reason) == ("load", "unload"), (loaded, unloaded)
        return loaded.done_reason

    def tools(self):
        asked = "What is the weather in Paris? Call get_weather."
        reply = self._client.chat(
            model=self._model, messages=[user(asked)], tools=[WEATHER], options=GREEDY | {"num_predict": 60}
        )
        for call in reply.message.tool_calls or []:
            assert call.function.name == "get_weather", call
        call = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}}
        check_city(call["function"]["arguments"])
        turns = [
            user(asked),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"},
        ]
        reply = self._client.chat(model=self._model, messages=turns, tools=[WEATHER], options=GREEDY)
        assert reply.message.content or reply.message.tool_calls, reply
        return reply.message.content[:40]

    def structured_output(self):
        reply = self._client.chat(
            model=self._model,
            messages=[user("Invent a person.")],
            format=Person.model_json_schema(),
            options={"temperature": 0, "num_predict": 100},
        )
        return str(Person.model_validate_json(reply.message.content))

    def json_mode(self):
        reply = self._client.generate(
            model=self._model, prompt="A JSON object with a colour.", format="json", options=GREEDY
        )
        assert reply.response.startswith("{"), reply
        if reply.done_reason == "stop":
            json.loads(reply.response)
        return reply.response[:40]

    def thinking(self):
        asked = {"model": self._model, "messages": [user(PROMPT)], "options": GREEDY, "think": True}
        whole = self._reasoning.chat(**asked)
        assert whole.message.thinking and not whole.message.content, whole
        parts = self._reasoning.chat(**asked, stream=True)
        text = "".join(part.message.thinking or "" for part in parts)
        assert text == whole.message.thinking, (text, whole)
        return text[:40]

    def embeddings(self):
        model = self._embeddings.list().models[0].model
        many = self._embeddings.embed(model=model, input=["The sky is blue.", "Grass is green."])
        one = self._embeddings.embeddings(model=model, prompt="The sky is blue.")
        assert len(many.embeddings) == 2 and many.embeddings[0] == one.embedding
        # The fixture has a context of 256 tokens, of which one ends each text.
        long, fits = self._embeddings.embed(model=model, input=["a" * 1000, "a" * 255]).embeddings
        assert long == fits
        return f"{len(one.embedding)} values"

    def errors(self):
        for status, ask in [
            (404, lambda: self._client.chat(model="llama3.2", messages=[user(PROMPT)])),
            (404, lambda: self._client.pull("llama3.2")),
            (404, lambda: self._client.delete(self._model)),
            (400, lambda: self._client.chat(model=self._model, messages=[user(PROMPT)], think=True)),
            (400, lambda: self._client.generate(model=self._model, prompt="a", options={"mirostat": 1})),
        ]:
            try:
                ask()
            except ollama.ResponseError as error:
                assert error.status_code == status, error
                message = error.error
            else:
                raise AssertionError("accepted")
        return message[:60]


def main():
    asked = options("reasoning-url", "embeddings-url")
    checks = Checks(asked.url, asked.reasoning_url, asked.embeddings_url)
    run(f"ollama {version('ollama')}", checks, asked.short)


if __name__ == "__main__":
    main()
