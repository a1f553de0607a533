// Stock Node clients against a running server: clients.mjs URL. One line for each check.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const [, , url] = process.argv;
const apiKey = "secret";
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const ollama = new Ollama({ host: url, headers: { Authorization: `Bearer ${apiKey}` } });
const provider = createOpenAICompatible({
  name: "foretoken",
  baseURL: url + "/v1",
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const base = { model: provider(model), temperature: 0, maxRetries: 0 };
const prompt = "Name three colours.";
const messages = [{ role: "user", content: prompt }];
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string().max(20), unit: z.enum(["celsius", "fahrenheit"]) }),
  execute: async ({ city }) => `18 degrees in ${city}`,
});

function expect(holds, what) {
  if (!holds) throw new Error(JSON.stringify(what));
}

const checks = {
  async "openai chat, whole and streamed"() {
    const asked = { model, messages, temperature: 0, max_tokens: 24 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    expect(text === whole.choices[0].message.content, [text, whole]);
    return `${whole.usage.completion_tokens} tokens`;
  },
  async "openai completion"() {
    const asked = { model, prompt: "The sky is", max_tokens: 8, temperature: 0, top_k: 5, spec_length: 0 };
    return (await client.completions.create(asked)).choices[0].text;
  },
  async "openai responses"() {
    const reply = await client.responses.create({ model, input: prompt, max_output_tokens: 24, temperature: 0 });
    expect(reply.output_text.length > 0, reply);
    return reply.output_text.slice(0, 40);
  },
  async "openai errors"() {
    try {
      await client.chat.completions.create({ model, messages, n: 0 });
    } catch (error) {
      expect(error instanceof OpenAI.BadRequestError && error.param === "n", error);
      return error.message.slice(0, 60);
    }
    throw new Error("accepted");
  },
  async "ollama chat, whole and streamed"() {
    const [{ model }] = (await ollama.list()).models;
    const asked = { model, messages, options: { temperature: 0, num_predict: 24 } };
    const whole = await ollama.chat(asked);
    expect(whole.done_reason === "length" && whole.eval_count === 24, whole);
    let text = "";
    for await (const part of await ollama.chat({ ...asked, stream: true })) text += part.message.content;
    expect(text === whole.message.content, [text, whole]);
    return `${model}: ${whole.prompt_eval_count} + ${whole.eval_count} tokens`;
  },
  async "ollama structured output"() {
    const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
    const format = z.toJSONSchema(schema);
    const options = { temperature: 0, num_predict: 100 };
    const reply = await ollama.generate({ model, prompt: "Invent a person.", format, options });
    return JSON.stringify(schema.parse(JSON.parse(reply.response)));
  },
  async "ollama errors"() {
    try {
      await ollama.chat({ model: "llama3.2", messages });
    } catch (error) {
      expect(error.status_code === 404, error);
      return error.message.slice(0, 60);
    }
    throw new Error("accepted");
  },
  async "ai generateText and streamText"() {
    const asked = { ...base, prompt, maxOutputTokens: 24 };
    const whole = await generateText(asked);
    expect(whole.finishReason === "length", whole.finishReason);
    let text = "";
    let failure;
    const stream = streamText({ ...asked, onError: ({ error }) => (failure = error) });
    for await (const part of stream.textStream) text += part;
    if (failure) throw failure;
    expect(text === whole.text, [text, whole.text]);
    const usage = await stream.usage;
    expect(usage.outputTokens === 24, usage);
    return `${usage.inputTokens} + ${usage.outputTokens} tokens`;
  },
  async "ai tools"() {
    const reply = await generateText({
      ...base,
      prompt: "What is the weather in Paris?",
      tools: { weather },
      toolChoice: { type: "tool", toolName: "weather" },
      maxOutputTokens: 100,
      stopWhen: stepCountIs(1),
    });
    expect(reply.toolCalls.length === 1, reply.toolCalls);
    return JSON.stringify(reply.toolCalls[0].input).slice(0, 60);
  },
  async "ai structured output"() {
    const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
    const output = Output.object({ schema });
    const reply = await generateText({ ...base, prompt: "Invent a person.", output, maxOutputTokens: 100 });
    expect(Number.isInteger(reply.output.age), reply.output);
    return JSON.stringify(reply.output);
  },
};

console.log(`node ${process.version}`);
let failures = 0;
for (const [name, check] of Object.entries(checks)) {
  const started = performance.now();
  let [outcome, detail] = ["ok", ""];
  try {
    detail = await check();
  } catch (error) {
    failures += 1;
    [outcome, detail] = ["FAILED", `${error} ${error.responseBody ?? ""}`.slice(0, 600)];
  }
  const seconds = ((performance.now() - started) / 1000).toFixed(1).padStart(5);
  console.log(`${outcome.padEnd(6)} ${name.padEnd(36)} ${seconds} s  ${detail}`);
}
const count = Object.keys(checks).length;
console.log(`${count - failures} of ${count} passed`);
process.exit(failures > 0 ? 1 : 0);
