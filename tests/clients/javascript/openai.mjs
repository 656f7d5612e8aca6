// OpenAI's client: responses whole, streamed, parsed, with a tool, continued. Prints what it got as JSON.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const found = {};

const whole = await client.responses.create({ model, input: "Count." });
found.whole = whole.output_text;

found.streamed = "";
const stream = client.responses.stream({ model, input: "Count." });
for await (const event of stream) {
  if (event.type === "response.output_text.delta") found.streamed += event.delta;
}
found.final = (await stream.finalResponse()).output_text;

const Place = z.object({ city: z.string() });
const parsed = await client.responses.parse({
  model,
  input: "Describe Köln.",
  text: { format: zodTextFormat(Place, "place") },
});
found.parsed = parsed.output_parsed;

const tools = [
  {
    type: "function",
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    strict: false,
  },
];
const asked = await client.responses.create({ model, input: "What is the weather?", tools });
const call = asked.output.find((item) => item.type === "function_call");
found.arguments = JSON.parse(call.arguments);
const told = await client.responses.create({
  model,
  tools,
  previous_response_id: asked.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }],
});
found.told = told.output_text;

found.retrieved = (await client.responses.retrieve(whole.id)).output_text;
await client.responses.delete(whole.id);
try {
  await client.responses.retrieve(whole.id);
} catch (error) {
  found.gone = error.status;
}

const chat = await client.chat.completions.create({ model, messages: [{ role: "user", content: "Count." }] });
found.chat = chat.choices[0].message.content;

console.log(JSON.stringify(found));
