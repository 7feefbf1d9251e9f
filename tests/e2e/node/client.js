// Calls a server as a Node backend would and prints what it saw as one line of JSON.
//   node client.js ADDRESS PROTO_FOLDER
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, protoFolder] = process.argv.slice(2);
const definition = loader.loadSync("tandem/v1/generation.proto", {
  includeDirs: [protoFolder],
  longs: Number,
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

function stream(request, { deadlineMs, cancelAfter } = {}) {
  const options = deadlineMs ? { deadline: Date.now() + deadlineMs } : {};
  return new Promise((resolve) => {
    const events = [];
    const call = client.Generate(request, options);
    call.on("data", (event) => {
      events.push(event);
      if (events.length === cancelAfter) call.cancel();
    });
    call.on("error", () => {});
    call.on("status", (status) => resolve({ events, code: status.code, details: status.details }));
  });
}

function unary(method, request) {
  return new Promise((resolve, reject) =>
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))),
  );
}

const prompt = { text: "the quick brown fox", sampling: { temperature: 0 } };
const ok = await stream({ ...prompt, stopping: { maxTokens: 12 } });
const late = await stream({ ...prompt, stopping: { maxTokens: 480 } }, { deadlineMs: 40 });
const left = await stream({ ...prompt, stopping: { maxTokens: 480 } }, { cancelAfter: 2 });
const wrong = await stream({ ...prompt, sampling: { temperature: -1 } });
const model = await unary("GetModel", {});
const answer = await unary("GenerateUnary", { request: { ...prompt, stopping: { maxTokens: 12 } } });
console.log(
  JSON.stringify({
    kinds: ok.events.map((event) => event.event),
    tokenIds: ok.events.flatMap((event) => event.delta?.tokenIds ?? []),
    text: ok.events.map((event) => event.delta?.text ?? "").join(""),
    reason: ok.events.at(-1).finished.choices[0].finishReason,
    codes: { ok: ok.code, late: late.code, left: left.code, wrong: wrong.code },
    wrongDetails: wrong.details,
    model: model.name,
    unaryTokenIds: answer.completions[0].tokenIds,
  }),
);
client.close();
