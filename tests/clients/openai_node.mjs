// openai, the client of npm: a second parser of the same answers.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { KEY, MODEL, PROMPT, UNICODE, URL, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: PROMPT }];
const greedy = { model: MODEL, temperature: 0, max_tokens: 24 };

async function refused(call, kind) {
  try {
    await call();
  } catch (error) {
    assert.equal(error.constructor.name, kind.name, String(error));
    return error;
  }
  assert.fail("it was answered");
}

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

await run({
  async models() {
    const ids = (await collected(client.models.list())).map((model) => model.id);
    assert(ids.includes(MODEL));
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
    assert.equal((await refused(() => client.models.retrieve("no-such"), OpenAI.NotFoundError)).code, "model_not_found");
  },
  async chat() {
    const { data, request_id } = await client.chat.completions.create({ ...greedy, messages }).withResponse();
    assert(request_id);
    assert(data.choices[0].message.content.length > 0);
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
    const stream = await client.chat.completions.create({ ...greedy, messages, stream: true, stream_options: { include_usage: true } });
    const chunks = await collected(stream);
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, data.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).usage.completion_tokens, data.usage.completion_tokens);
    assert.deepEqual(chunks.at(-1).choices, []);
  },
  async the_clients_own_stream() {
    const runner = client.chat.completions.stream({ ...greedy, messages, logprobs: true, top_logprobs: 2 });
    const final = await runner.finalChatCompletion();
    const whole = await client.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 });
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.deepEqual(final.choices[0].logprobs.content, whole.choices[0].logprobs.content);
  },
  async completions() {
    const whole = await client.completions.create({ ...greedy, prompt: PROMPT, logprobs: 2 });
    const chunks = await collected(await client.completions.create({ ...greedy, prompt: PROMPT, logprobs: 2, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), whole.choices[0].text);
    const logprobs = chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.token_logprobs ?? []);
    assert.deepEqual(logprobs, whole.choices[0].logprobs.token_logprobs);
  },
  async unicode() {
    const asked = { ...greedy, prompt: UNICODE, echo: true };
    const whole = (await client.completions.create(asked)).choices[0].text;
    assert(whole.startsWith(UNICODE));
    const chunks = await collected(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), whole);
  },
  async embeddings() {
    const asked = { model: MODEL, input: "The sea is blue." };
    const plain = (await client.embeddings.create({ ...asked, encoding_format: "float" })).data[0].embedding;
    const coded = (await client.embeddings.create(asked)).data[0].embedding; // base64 on the wire
    assert(plain.length > 100);
    assert(plain.every((value, i) => Math.abs(value - coded[i]) < 1e-5));
  },
  async responses() {
    const asked = { model: MODEL, input: PROMPT, max_output_tokens: 24, temperature: 0 };
    const whole = await client.responses.create(asked);
    assert(whole.output_text.length > 0);
    const events = await collected(await client.responses.create({ ...asked, stream: true }));
    const text = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    assert.equal(text.join(""), whole.output_text);
  },
  async errors() {
    const bad = await refused(() => client.chat.completions.create({ ...greedy, messages, top_p: 5 }), OpenAI.BadRequestError);
    assert.deepEqual([bad.status, bad.param, bad.code, bad.type], [400, "top_p", "invalid_value", "invalid_request_error"]);
    assert(bad.requestID);
    const wrong = client.withOptions({ apiKey: "wrong" });
    const key = await refused(() => wrong.chat.completions.create({ ...greedy, messages }), OpenAI.AuthenticationError);
    assert.equal(key.code, "invalid_api_key");
  },
  async leaving_a_stream() {
    const asked = { ...greedy, prompt: PROMPT, max_tokens: 4000, stream: true, ignore_eos: true };
    const stream = await client.completions.create(asked);
    for await (const _ of stream) break; // leaving the loop aborts the request
    for (let i = 0; i < 200; i++) {
      const health = await (await fetch(`${URL}/health`)).json();
      if (health.running === 0 && health.waiting === 0) return;
      await new Promise((wake) => setTimeout(wake, 50));
    }
    assert.fail("its request goes on");
  },
});
