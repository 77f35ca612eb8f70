// ai with @ai-sdk/openai-compatible: tools, against a server whose chat template takes them.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, URL, run } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "sidestream", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true });
const get_weather = tool({ description: "The weather in a city.", inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }) });
const ask = {
  model: provider(MODEL),
  prompt: "What is the weather in Paris?",
  tools: { get_weather },
  toolChoice: { type: "tool", toolName: "get_weather" },
  temperature: 0,
  maxOutputTokens: 200,
  maxRetries: 0,
};

await run({
  async call() {
    const { toolCalls, finishReason } = await generateText(ask);
    assert.deepEqual([toolCalls.length, toolCalls[0].toolName, finishReason], [1, "get_weather", "tool-calls"]);
    assert(["Paris", "Oslo"].includes(toolCalls[0].input.city));
  },
  async stream_equals_whole() {
    const whole = await generateText(ask);
    const failures = [];
    const result = streamText({ ...ask, onError: ({ error }) => failures.push(error) });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    assert.deepEqual(failures, []);
    assert(kinds.includes("tool-input-delta") && kinds.includes("tool-call"), kinds.join());
    assert.deepEqual((await result.toolCalls)[0].input, whole.toolCalls[0].input);
    assert.equal(await result.finishReason, "tool-calls");
  },
});
