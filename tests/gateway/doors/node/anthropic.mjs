// The official client against a server: node anthropic.mjs URL MODEL. Prints what it received as JSON.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = {
  model,
  max_tokens: 40,
  temperature: 0,
  system: "Be brief.",
  messages: [{ role: "user", content: "What is 12 + 30?" }],
};
const input_schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 8 }, days: { enum: [1, 2] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ name: "weather", description: "The weather.", input_schema }];
const any = { ...asked, max_tokens: 200, tools, tool_choice: { type: "any", disable_parallel_tool_use: true } };

const whole = await client.messages.create(asked);
const { max_tokens, temperature, ...prompt } = asked;
const counted = await client.messages.countTokens(prompt);
const { input_tokens, cache_read_input_tokens } = whole.usage;
assert.equal(counted.input_tokens, input_tokens + (cache_read_input_tokens ?? 0));

const stream = client.messages.stream(asked);
let streamed = "";
stream.on("text", (delta) => (streamed += delta));
const final = await stream.finalMessage();
assert.equal(streamed, whole.content[0].text);
assert.deepEqual(final.content, whole.content);
assert.equal(final.stop_reason, whole.stop_reason);

const called = await client.messages.create(any);
assert.equal(called.stop_reason, "tool_use");
const [use] = called.content;
const calling = await client.messages.stream(any).finalMessage();
assert.deepEqual(calling.content[0].input, use.input);
const result = { type: "tool_result", tool_use_id: use.id, content: [{ type: "text", text: "sunny" }] };
const answered = await client.messages.create({
  ...asked,
  tools,
  messages: [
    ...asked.messages,
    { role: "assistant", content: called.content },
    { role: "user", content: [result] },
  ],
});

const run = ({ city }) => `sunny in ${city}`;
const runner = client.beta.messages.toolRunner({ ...any, tools: [{ ...tools[0], run }], max_iterations: 2 });
const turns = [];
for await (const message of runner) turns.push(message.stop_reason);
assert.deepEqual(turns, ["tool_use", "tool_use"]);

const wrong = await client.messages.create({ ...asked, max_tokens: 0 }).catch((error) => error);
assert.ok(wrong instanceof Anthropic.BadRequestError);
assert.equal(wrong.error.error.type, "invalid_request_error");

console.log(
  JSON.stringify({
    text: whole.content[0].text,
    counted: counted.input_tokens,
    call: { name: use.name, input: use.input },
    answered: answered.content,
  }),
);
