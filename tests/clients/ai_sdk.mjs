// ai with @ai-sdk/openai-compatible: the client that checks every answer against a schema.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, embedMany, generateText, streamText } from "ai";
import { KEY, MODEL, PROMPT, UNICODE, URL, run } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "sidestream", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true });
const model = provider(MODEL);
const ask = { model, prompt: PROMPT, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

async function streamed(asked) {
  const failures = [];
  const result = streamText({ ...asked, onError: ({ error }) => failures.push(error) });
  let text = "";
  for await (const part of result.textStream) text += part;
  assert.deepEqual(failures, []);
  return { text, usage: await result.usage, finishReason: await result.finishReason };
}

async function refused(asked) {
  try {
    await generateText(asked);
  } catch (error) {
    assert(APICallError.isInstance(error), String(error));
    return error;
  }
  assert.fail("it was answered");
}

await run({
  async chat() {
    const { text, usage, finishReason, response, warnings } = await generateText({ ...ask, system: "Be brief." });
    assert(text.length > 0);
    assert(["stop", "length"].includes(finishReason), finishReason);
    assert(usage.inputTokens > 10 && usage.outputTokens > 0 && usage.outputTokens <= 24);
    assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
    assert.equal(response.modelId, MODEL);
    assert.deepEqual(warnings ?? [], []);
  },
  async stream_equals_whole() {
    const whole = await generateText(ask);
    const parts = await streamed(ask);
    assert.equal(parts.text, whole.text);
    assert.equal(parts.usage.outputTokens, whole.usage.outputTokens);
    assert.equal(parts.usage.inputTokens, whole.usage.inputTokens);
    assert.equal(parts.finishReason, whole.finishReason);
  },
  async unicode() {
    const asked = { ...ask, prompt: `Repeat after me: ${UNICODE}` };
    assert.equal((await streamed(asked)).text, (await generateText(asked)).text);
  },
  async completions() {
    const asked = { ...ask, model: provider.completionModel(MODEL) };
    const whole = await generateText(asked);
    assert(whole.text.length > 0);
    assert.equal((await streamed(asked)).text, whole.text);
  },
  async limit_stop_and_seed() {
    const short = await generateText({ ...ask, maxOutputTokens: 2 });
    assert.deepEqual([short.finishReason, short.usage.outputTokens], ["length", 2]);
    const text = (await generateText(ask)).text;
    const stop = text.slice(Math.floor(text.length / 2)).slice(0, 3);
    const cut = await generateText({ ...ask, stopSequences: [stop] });
    assert.deepEqual([cut.text, cut.finishReason], [text.slice(0, text.indexOf(stop)), "stop"]);
    const seeded = async (seed) => (await generateText({ ...ask, temperature: 1.5, seed })).text;
    assert.equal(await seeded(1), await seeded(1));
    assert.notEqual(await seeded(1), await seeded(2));
  },
  async embeddings() {
    const asked = { model: provider.embeddingModel(MODEL), maxRetries: 0 };
    const { embedding, usage } = await embed({ ...asked, value: "The sea is blue." });
    assert(embedding.length > 100 && usage.tokens > 3);
    const { embeddings } = await embedMany({ ...asked, values: ["The sea is blue.", "Quite another one"] });
    assert.equal(embeddings.length, 2);
    assert(embeddings[0].every((value, i) => Math.abs(value - embedding[i]) < 1e-5));
  },
  async errors() {
    const bad = await refused({ ...ask, topP: 5 });
    assert.equal(bad.statusCode, 400);
    assert.deepEqual([bad.data.error.param, bad.data.error.code], ["top_p", "invalid_value"]);
    assert.equal(bad.isRetryable, false);
    const none = await refused({ ...ask, model: provider("no-such") });
    assert.deepEqual([none.statusCode, none.data.error.code], [404, "model_not_found"]);
    const wrong = createOpenAICompatible({ name: "sidestream", baseURL: `${URL}/v1`, apiKey: "wrong" });
    assert.equal((await refused({ ...ask, model: wrong(MODEL) })).statusCode, 401);
  },
  async leaving_a_stream() {
    const left = new AbortController();
    const result = streamText({ ...ask, maxOutputTokens: 4000, abortSignal: left.signal, onError() {} });
    for await (const _ of result.textStream) break;
    left.abort();
    for (let i = 0; i < 200; i++) {
      const health = await (await fetch(`${URL}/health`)).json();
      if (health.running === 0 && health.waiting === 0) return;
      await new Promise((wake) => setTimeout(wake, 50));
    }
    assert.fail("its request goes on");
  },
});
