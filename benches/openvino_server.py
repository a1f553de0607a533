#!/usr/bin/env python3
"""OpenVINO GenAI's continuous batching pipeline behind OpenAI's /v1/completions, to compare servers with it.

Needs openvino-genai (on PyPI), which has a pipeline but no server. It knows as much of the API as benches/compare.py and
scripts/exactness.py ask for. A stream has an event for each step of the pipeline, so that it can be timed; its text is in the
last one. One thread runs the pipeline, as it has to.
"""

import argparse
import http.server
import itertools
import json
import queue
import threading

import numpy
import openvino
import openvino_genai

ASSISTANT_TOKENS, NGRAM = 5, 3  # of --prompt-lookup


class Job:
    """A request; `told` gets the new ids of each step, and the error or None at the end."""

    def __init__(self, body, ids, options):
        self.body, self.ids, self.told, self.config = body, ids, queue.Queue(), openvino_genai.GenerationConfig()
        self.config.max_new_tokens = body.get("max_tokens", 16)
        self.config.ignore_eos = body.get("ignore_eos", False)
        if body.get("temperature", 1) > 0:
            self.config.do_sample, self.config.temperature = True, body.get("temperature", 1)
            self.config.top_p, self.config.rng_seed = body.get("top_p", 1), body.get("seed", 0)
        if options.prompt_lookup:
            self.config.num_assistant_tokens, self.config.max_ngram_size = ASSISTANT_TOKENS, NGRAM

    def parts(self):
        while isinstance(part := self.told.get(), list):
            yield part
        if part:
            raise part


class Engine:
    def __init__(self, options):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = options.prefix_caching
        scheduler.cache_size, scheduler.max_num_seqs = options.cache_gb, options.max_num_seqs
        scheduler.max_num_batched_tokens = options.max_num_batched_tokens
        properties = {"INFERENCE_NUM_THREADS": options.threads, **options.properties}
        properties |= {"prompt_lookup": True} if options.prompt_lookup else {}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self.tokenizer, self.jobs, self.options = self.pipeline.get_tokenizer(), queue.Queue(), options

    def run(self):
        running, numbers = {}, itertools.count()
        while True:
            while not running or not self.jobs.empty():
                job = self.jobs.get()
                try:
                    ids = openvino.Tensor(numpy.array([job.ids], dtype=numpy.int64))
                    running[job] = self.pipeline.add_request(next(numbers), ids, job.config)
                except RuntimeError as e:
                    job.told.put(e)
            self.pipeline.step()
            for job, handle in list(running.items()):
                if handle.can_read():
                    job.told.put([token for output in handle.read().values() for token in output.generated_ids])
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
                    job.told.put(None)
                    del running[job]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, *_):
        pass

    def answer(self, answer, status=200):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"data": [{"id": "openvino"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer({"error": {"message": "unknown route"}}, 404)
        if body.get("logprobs"):
            return self.answer({"error": {"message": "no log-probabilities of tokens that were not chosen"}}, 400)
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = self.engine.tokenizer.encode(ids).input_ids.data[0].tolist()
        job = Job(body, ids, self.engine.options)
        self.engine.jobs.put(job)
        try:
            self.stream(job) if body.get("stream") else self.answer(self.result(job, sum(job.parts(), [])))
        except RuntimeError as e:
            self.answer({"error": {"message": str(e)}}, 500)

    def stream(self, job):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        ids = []
        for part in job.parts():
            ids += part
            self.wfile.write(b'data: {"choices": [{"index": 0, "text": ""}]}\n\n')
        self.wfile.write(f"data: {json.dumps(self.result(job, ids))}\n\ndata: [DONE]\n\n".encode())

    def result(self, job, ids):
        usage = {"prompt_tokens": len(job.ids), "completion_tokens": len(ids), "total_tokens": len(job.ids) + len(ids)}
        return {"choices": [{"index": 0, "text": self.engine.tokenizer.decode(ids)}], "usage": usage}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="GGUF file, or a folder of OpenVINO's format")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--properties", type=json.loads, default={}, metavar="JSON", help="of the pipeline")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--prompt-lookup", action="store_true", help="drafts from n-grams of the prompt")
    options = parser.parse_args()
    Handler.engine = Engine(options)
    server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.engine.run()


if __name__ == "__main__":
    main()
