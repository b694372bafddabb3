// Streams an answer, resumes a lost stream, reads the details of an error, cancels: with a client that is generated from
// protos/.
//
//	./generate.sh && go mod tidy && DECANT_ADDRESS=127.0.0.1:50051 go run .
//
// Without a module proxy, Debian's packages do: with this folder as WORKSPACE/src/decant.example/ask,
//
//	./generate.sh && GO111MODULE=off GOPATH=WORKSPACE:/usr/share/gocode go build && DECANT_ADDRESS=127.0.0.1:50051 ./ask
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	pb "decant.example/ask/decantv1"
)

func main() {
	address := os.Getenv("DECANT_ADDRESS")
	if address == "" {
		address = "127.0.0.1:50051"
	}
	// Since grpc-go 1.63: grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), ...).
	connection, err := grpc.Dial(address, grpc.WithInsecure(), grpc.WithNoProxy())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewInferenceServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, show := range []func(context.Context, pb.InferenceServiceClient) error{stream, resume, refused, cancelled} {
		if err := show(ctx, client); err != nil {
			log.Fatal(err)
		}
	}
}

// newRequest returns a greedy request with this temperature.
func newRequest(temperature float32) *pb.GenerateRequest {
	maxTokens := uint32(40)
	return &pb.GenerateRequest{
		RequestId: newID(),
		Input:     &pb.GenerateRequest_Prompt{Prompt: "def read_lines(path):\n"},
		Sampling:  &pb.SamplingParams{Temperature: &temperature},
		Stopping:  &pb.StoppingParams{MaxTokens: &maxTokens},
	}
}

func newID() string {
	bytes := make([]byte, 16)
	if _, err := rand.Read(bytes); err != nil {
		log.Fatal(err)
	}
	return fmt.Sprintf("%x", bytes)
}

// stream prints deltas as they arrive; the last message has usage and receipt.
func stream(ctx context.Context, client pb.InferenceServiceClient) error {
	answer, err := client.GenerateStream(ctx, newRequest(0))
	if err != nil {
		return err
	}
	for {
		message, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(message.GetDelta().GetText())
		if finished := message.GetFinished(); finished != nil {
			tokens, ms := message.GetUsage().GetCompletionTokens(), message.GetReceipt().GetE2EMs()
			fmt.Printf("\n%v: %d tokens in %.0f ms\n", finished.GetFinishReason(), tokens, ms)
		}
	}
}

// resume loses a stream in the middle of an answer, and reads the rest by the request's id: on any router.
func resume(ctx context.Context, client pb.InferenceServiceClient) error {
	request := newRequest(0)
	first, lose := context.WithCancel(ctx)
	defer lose()
	answer, err := client.GenerateStream(first, request)
	if err != nil {
		return err
	}
	text, lost, err := read(answer, 10)
	if err != nil {
		return err
	}
	lose() // as if the connection broke; the request goes on for `Limits.resume_grace_ms`
	answer, err = client.ResumeStream(ctx, &pb.ResumeStreamRequest{RequestId: request.GetRequestId(), AfterSeq: lost})
	if err != nil {
		return err
	}
	rest, seq, err := read(answer, math.MaxUint64)
	if err != nil {
		return err
	}
	fmt.Printf("lost after %d tokens, resumed to %d: %q\n", lost, seq, text+rest)
	return nil
}

// read returns the text of an answer and its last `seq`: to its end, or until `seq` has reached enough.
func read(answer pb.InferenceService_GenerateStreamClient, enough uint64) (text string, seq uint64, err error) {
	for seq < enough {
		message, err := answer.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return text, seq, err
		}
		if delta := message.GetDelta(); delta != nil {
			text, seq = text+delta.GetText(), message.GetSeq()
		}
	}
	return text, seq, nil
}

// refused reads why a request was refused: details are typed messages.
func refused(ctx context.Context, client pb.InferenceServiceClient) error {
	_, err := client.Generate(ctx, newRequest(-1))
	if err == nil {
		return errors.New("a negative temperature was accepted")
	}
	var info *errdetails.ErrorInfo
	var bad *errdetails.BadRequest
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			info = detail
		case *errdetails.BadRequest:
			bad = detail
		}
	}
	violation := bad.GetFieldViolations()[0]
	fmt.Printf("%v %s: %s, %s\n", status.Code(err), info.GetReason(), violation.GetField(), info.GetMetadata()["limit"])
	return nil
}

// cancelled ends a request by CancelGeneration, which ends the streams of other readers too.
func cancelled(ctx context.Context, client pb.InferenceServiceClient) error {
	request := newRequest(0)
	ignoreEos := true
	request.Stopping = &pb.StoppingParams{IgnoreEos: &ignoreEos}
	answer, err := client.GenerateStream(ctx, request)
	if err != nil {
		return err
	}
	if _, _, err := read(answer, 1); err != nil {
		return err
	}
	if _, err := client.CancelGeneration(ctx, &pb.CancelGenerationRequest{RequestId: request.GetRequestId()}); err != nil {
		return err
	}
	_, _, err = read(answer, math.MaxUint64)
	fmt.Println("the stream ended:", status.Code(err))
	return nil
}
