# Streams an answer, resumes a lost stream, reads the details of an error: with a client that is generated from protos/.
#
#     ./generate.sh && DECANT_ADDRESS=127.0.0.1:50051 ruby ask.rb

$LOAD_PATH.unshift(File.join(__dir__, "gen"))
require "securerandom"
require "grpc"
require "google/protobuf/well_known_types" # Any#unpack
require "inference_services_pb"
require "google/rpc/status_pb"
require "google/rpc/error_details_pb"

include Decant::V1

ADDRESS = ENV.fetch("DECANT_ADDRESS", "127.0.0.1:50051")
STUB = InferenceService::Stub.new(ADDRESS, :this_channel_is_insecure, channel_args: { "grpc.enable_http_proxy" => 0 })

# A greedy request with these sampling parameters.
def new_request(temperature: 0)
  GenerateRequest.new(
    request_id: SecureRandom.uuid,
    prompt: "def read_lines(path):\n",
    sampling: SamplingParams.new(temperature: temperature),
    stopping: StoppingParams.new(max_tokens: 40)
  )
end

# Print deltas as they arrive; the last message has usage and receipt.
def stream
  STUB.generate_stream(new_request, deadline: Time.now + 60).each do |message|
    print message.delta.text if message.event == :delta
    next unless message.event == :finished

    puts "\n#{message.finished.finish_reason}: #{message.usage.completion_tokens} tokens in #{message.receipt.e2e_ms.round} ms"
  end
end

# Lose a stream in the middle of an answer, and read the rest by the request's id: on any router.
def resume
  request = new_request
  text = +""
  lost = 0
  call = STUB.generate_stream(request, return_op: true)
  call.execute.each do |message|
    next unless message.event == :delta

    text << message.delta.text
    lost = message.seq
    break if lost >= 10 # as if the connection broke; the request goes on for `Limits.resume_grace_ms`
  end
  call.cancel
  seq = lost
  STUB.resume_stream(ResumeStreamRequest.new(request_id: request.request_id, after_seq: lost)).each do |message|
    next unless message.event == :delta

    text << message.delta.text
    seq = message.seq
  end
  puts "lost after #{lost} tokens, resumed to #{seq}: #{text.dump}"
end

# Read why a request was refused: details are typed messages.
def refused
  STUB.generate(new_request(temperature: -1))
rescue GRPC::InvalidArgument => error
  details = error.to_rpc_status.details.to_h { |any| [any.type_name, any] }
  info = details.fetch("google.rpc.ErrorInfo").unpack(Google::Rpc::ErrorInfo)
  bad = details.fetch("google.rpc.BadRequest").unpack(Google::Rpc::BadRequest)
  puts "#{error.class} #{info.reason}: #{bad.field_violations.first.field}, #{info.metadata['limit']}"
end

stream
resume
refused
