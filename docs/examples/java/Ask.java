// Streams an answer, resumes a lost stream, reads the details of an error, cancels: with a client that is generated from
// protos/.
//
//     ./generate.sh
//     javac -d classes -cp "$JARS" Ask.java $(find gen -name '*.java')
//     DECANT_ADDRESS=127.0.0.1:50051 java -cp "classes:$JARS" Ask
//
// JARS is '/usr/share/java/*' with Debian's libgrpc-java, libnetty-java, libperfmark-java, libprotobuf-java, libguava-java
// and libgeronimo-annotation-1.3-spec-java. Maven and Gradle get them from io.grpc:grpc-netty-shaded, grpc-protobuf and
// grpc-stub, and javax.annotation:javax.annotation-api.

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import decant.v1.CancelGenerationRequest;
import decant.v1.GenerateRequest;
import decant.v1.GenerateStreamResponse;
import decant.v1.InferenceServiceGrpc;
import decant.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import decant.v1.ResumeStreamRequest;
import decant.v1.SamplingParams;
import decant.v1.StoppingParams;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

public class Ask {
    private final InferenceServiceBlockingStub stub;

    private Ask(ManagedChannel channel) {
        stub = InferenceServiceGrpc.newBlockingStub(channel);
    }

    public static void main(String[] arguments) throws Exception {
        String address = System.getenv().getOrDefault("DECANT_ADDRESS", "127.0.0.1:50051");
        ManagedChannel channel =
                ManagedChannelBuilder.forTarget(address).usePlaintext().proxyDetector(server -> null).build();
        try {
            Ask ask = new Ask(channel);
            ask.stream();
            ask.resume();
            ask.refused();
            ask.cancel();
        } finally {
            channel.shutdown().awaitTermination(10, TimeUnit.SECONDS);
        }
    }

    /** A greedy request with this temperature. */
    private static GenerateRequest.Builder newRequest(float temperature) {
        return GenerateRequest.newBuilder()
                .setRequestId(UUID.randomUUID().toString())
                .setPrompt("def read_lines(path):\n")
                .setSampling(SamplingParams.newBuilder().setTemperature(temperature))
                .setStopping(StoppingParams.newBuilder().setMaxTokens(40));
    }

    /** Print deltas as they arrive; the last message has usage and receipt. */
    private void stream() {
        Iterator<GenerateStreamResponse> answer =
                stub.withDeadlineAfter(60, TimeUnit.SECONDS).generateStream(newRequest(0).build());
        while (answer.hasNext()) {
            GenerateStreamResponse message = answer.next();
            System.out.print(message.getDelta().getText());
            if (message.hasFinished()) {
                System.out.printf(
                        "%n%s: %d tokens in %.0f ms%n",
                        message.getFinished().getFinishReason(),
                        message.getUsage().getCompletionTokens(),
                        message.getReceipt().getE2EMs());
            }
        }
    }

    /** Lose a stream in the middle of an answer, and read the rest by the request's id: on any router. */
    private void resume() throws Exception {
        GenerateRequest request = newRequest(0).build();
        StringBuilder text = new StringBuilder();
        Context.CancellableContext call = Context.current().withCancellation();
        long lost = call.call(() -> read(stub.generateStream(request), text, 10));
        call.cancel(null); // as if the connection broke; the request goes on for `Limits.resume_grace_ms`
        ResumeStreamRequest rest = ResumeStreamRequest.newBuilder()
                .setRequestId(request.getRequestId())
                .setAfterSeq(lost)
                .build();
        long seq = read(stub.resumeStream(rest), text, Long.MAX_VALUE);
        String shown = text.toString().replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n");
        System.out.printf("lost after %d tokens, resumed to %d: \"%s\"%n", lost, seq, shown);
    }

    /** Append the text of an answer and return its last `seq`: to its end, or until `seq` has reached enough. */
    private static long read(Iterator<GenerateStreamResponse> answer, StringBuilder text, long enough) {
        long seq = 0;
        while (seq < enough && answer.hasNext()) {
            GenerateStreamResponse message = answer.next();
            if (message.hasDelta()) {
                text.append(message.getDelta().getText());
                seq = message.getSeq();
            }
        }
        return seq;
    }

    /** Read why a request was refused: details are typed messages. */
    private void refused() throws InvalidProtocolBufferException {
        try {
            stub.generate(newRequest(-1).build());
        } catch (StatusRuntimeException error) {
            ErrorInfo info = null;
            BadRequest bad = null;
            for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
                if (detail.is(ErrorInfo.class)) {
                    info = detail.unpack(ErrorInfo.class);
                } else if (detail.is(BadRequest.class)) {
                    bad = detail.unpack(BadRequest.class);
                }
            }
            System.out.printf(
                    "%s %s: %s, %s%n",
                    error.getStatus().getCode(),
                    info.getReason(),
                    bad.getFieldViolations(0).getField(),
                    info.getMetadataOrThrow("limit"));
        }
    }

    /** End a request by CancelGeneration, which ends the streams of other readers too. */
    private void cancel() {
        StoppingParams endless = StoppingParams.newBuilder().setIgnoreEos(true).build();
        GenerateRequest request = newRequest(0).setStopping(endless).build();
        Iterator<GenerateStreamResponse> answer = stub.generateStream(request);
        read(answer, new StringBuilder(), 1);
        stub.cancelGeneration(CancelGenerationRequest.newBuilder().setRequestId(request.getRequestId()).build());
        try {
            read(answer, new StringBuilder(), Long.MAX_VALUE);
        } catch (StatusRuntimeException error) {
            System.out.println("the stream ended: " + error.getStatus().getCode());
        }
    }
}
