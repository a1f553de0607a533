"""instructor and lm-eval against a running server."""

import json
import os
import pathlib
import tempfile
from importlib.metadata import version

import instructor
import openai
from client_checks import KEY, Person, options, run, user

# Two tasks on files: one for texts, one for log-probabilities.
TEXTS = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: %(file)s}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: %(file)s}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(answer)}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
DOCUMENTS = [
    {"question": "What colour is grass?", "answer": "green", "choices": ["purple", "green"]},
    {"question": "What colour is the sky?", "answer": "blue", "choices": ["blue", "brown"]},
]


class Checks:
    """Its methods are the checks; each returns what is printed."""

    def __init__(self, url):
        self._url = url
        self._openai = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
        self._model = self._openai.models.list().data[0].id

    def _person(self, mode, **asked):
        client = instructor.from_openai(self._openai, mode=mode)
        asked |= dict(model=self._model, max_tokens=100, temperature=0, max_retries=0)
        return client.chat.completions.create(messages=[user("Jason is 25 years old.")], **asked)

    def instructor_tools(self):
        return repr(self._person(instructor.Mode.TOOLS, response_model=Person))

    def instructor_json_schema(self):
        return repr(self._person(instructor.Mode.JSON_SCHEMA, response_model=Person))

    def instructor_partial(self):
        """Long."""
        partial = instructor.Partial[Person]
        steps = list(self._person(instructor.Mode.TOOLS, response_model=partial, stream=True))
        assert steps[-1].name and steps[-1].age is not None, steps[-1]
        return f"{len(steps)} steps to {steps[-1]!r}"

    def _evaluate(self, task, model, **arguments):
        os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        import lm_eval  # It reads the environment, and is not installed for the short list.
        from lm_eval.tasks import TaskManager

        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "documents.jsonl")
            file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
            config = task % {"file": file}
            name = config.split("task: ")[1].split("\n")[0]
            pathlib.Path(folder, name + ".yaml").write_text(config)
            route = "chat/completions" if "chat" in model else "completions"
            arguments |= dict(model=self._model, base_url=f"{self._url}/v1/{route}", max_retries=1)
            os.environ["HF_HOME"] = folder
            results = lm_eval.simple_evaluate(
                model=model,
                model_args=arguments,
                tasks=[name],
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                apply_chat_template="chat" in model,
                bootstrap_iters=0,
                log_samples=True,
                cache_requests=False,
            )
        assert len(results["samples"][name]) == len(DOCUMENTS)
        return results["samples"][name]

    def lm_eval_texts(self):
        """Long."""
        samples = self._evaluate(TEXTS, "local-completions", tokenizer_backend=None, tokenized_requests=False)
        return repr([sample["filtered_resps"][0] for sample in samples])

    def lm_eval_chats(self):
        """Long."""
        samples = self._evaluate(TEXTS, "local-chat-completions")
        return repr([sample["filtered_resps"][0] for sample in samples])

    def lm_eval_log_probabilities(self):
        """Long."""
        samples = self._evaluate(CHOICES, "local-completions", tokenizer_backend="remote", auth_token=KEY)
        scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
        assert all(score < 0 for of_one in scores for score in of_one), scores
        assert all(a != b for a, b in scores), scores
        return repr([[round(score, 2) for score in of_one] for of_one in scores])


def main():
    asked = options()
    names = ["instructor"] if asked.short else ["instructor", "lm-eval"]
    run(", ".join(f"{name} {version(name)}" for name in names), Checks(asked.url), asked.short)


if __name__ == "__main__":
    main()
