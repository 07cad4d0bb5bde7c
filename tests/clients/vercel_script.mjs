// What users of the Vercel AI SDK do; runs in an environment of its own.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const provider = createOpenAICompatible({
  name: "corun", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const loose = createOpenAICompatible({ name: "corun", baseURL, apiKey: "none" });
const model = provider("scripted");
const prompt = "How is the weather in Paris?";
const ANSWER = "It is sunny.";
const schema = z.object({ city: z.enum(["Paris", "Rome"]), degrees: z.number().int(), is_sunny: z.boolean() });
const once = { maxRetries: 0 };

const calls = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { calls.push(city); return "sunny"; },
  }),
};

const plain = await generateText({ model, prompt, system: "Be brief.", ...once });
assert.equal(plain.text, ANSWER);
assert.ok(plain.usage.totalTokens > 0);

const streamed = streamText({ model, prompt, ...once });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, ANSWER);
assert.ok((await streamed.usage).totalTokens > 0);

const typed = await generateText({ model, prompt, output: Output.object({ schema }), ...once });
assert.ok(["Paris", "Rome"].includes(typed.output.city));
const object = await generateObject({ model, prompt, schema, ...once });
assert.equal(typeof object.object.degrees, "number");
const partial = streamObject({ model, prompt, schema, ...once });
let last;
for await (const piece of partial.partialObjectStream) last = piece;
assert.ok(["Paris", "Rome"].includes(last.city));
const free = await generateObject({ model: loose("scripted"), prompt, output: "no-schema", ...once });
assert.equal(typeof free.object, "object");

const told = await generateText({ model, prompt, tools, stopWhen: stepCountIs(3), ...once });
assert.equal(told.text, ANSWER);
assert.deepEqual(calls, ["Paris"]);
const live = streamText({ model, prompt, tools, stopWhen: stepCountIs(3), ...once });
assert.equal((await live.text), ANSWER);
assert.deepEqual(calls, ["Paris", "Paris"]);
const forced = await generateText({ model, prompt, tools, toolChoice: "required", ...once });
assert.equal(forced.toolCalls[0].toolName, "get_weather");
const named = await generateText({
  model, prompt, tools, toolChoice: { type: "tool", toolName: "get_weather" }, ...once,
});
assert.equal(named.toolCalls[0].toolName, "get_weather");
