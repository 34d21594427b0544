// Streams over gRPC through server reflection, without a .proto file:
//   k6 run -e ADDR=127.0.0.1:50051 -e ITERATIONS=40 benchmarks/k6_generate.js
import grpc from 'k6/net/grpc';
import { Counter, Trend } from 'k6/metrics';

export const options = {
  vus: Number(__ENV.VUS || 4),
  iterations: Number(__ENV.ITERATIONS || 40),
  thresholds: { failures: ['count==0'], answers: [`count==${__ENV.ITERATIONS || 40}`] },
};

const firstToken = new Trend('first_token_ms');
const answers = new Counter('answers');
const tokens = new Counter('tokens');
const failures = new Counter('failures');
const client = new grpc.Client();

export default function () {
  client.connect(__ENV.ADDR || '127.0.0.1:50051', { plaintext: true, reflect: true });
  const listed = client.invoke('baton.v1.Baton/ListModels', {});
  if (listed.status !== grpc.StatusOK || listed.message.models.length !== 1) {
    failures.add(1);
  }
  const stream = new grpc.Stream(client, 'baton.v1.Baton/Generate');
  const started = Date.now();
  let first = true;
  stream.on('data', (message) => {
    if (message.tokens) {
      tokens.add(message.tokens.tokenIds.length);
      if (first) {
        firstToken.add(Date.now() - started);
        first = false;
      }
    }
    if (message.finished && message.finished.reason === 'length') {
      answers.add(1);
    }
  });
  stream.on('error', (error) => {
    failures.add(1);
    console.error(JSON.stringify(error));
  });
  stream.on('end', () => client.close());
  stream.write({ prompt: `Story number ${__VU}-${__ITER}:`, maxTokens: 8, ignoreEos: true, temperature: 0 });
  stream.end();
}
