package resource

// Headers of the resource's HTTP interface. JSON numbers lose precision above 2^53 in some readers; the headers carry
// every fence exactly, as [Fence.String] writes it.
const (
	HeaderToken   = "X-Fence-Token"   // request: the grant's fencing token
	HeaderSeq     = "X-Fence-Seq"     // request: the write's number under its grant; 1 if absent
	HeaderKey     = "X-Fence-Key"     // request: the key, percent-escaped; it must be that of the path
	HeaderMax     = "X-Fence-Max"     // answer to an accepted call: the greatest fence accepted
	HeaderWritten = "X-Fence-Written" // answer to a read: "false" if only fenced reads have touched the key
	HeaderSeen    = "X-Fence-Seen"    // 409: the greatest fence accepted
	HeaderApplied = "X-Fence-Applied" // 409: "true" if the write repeats the accepted one
	HeaderFencing = "X-Fencing"       // every answer of a resource that doesn't enforce fencing: "off"
)

// DefaultMaxBody is the largest value in bytes that a handler takes, and a client too, unless their options say otherwise.
const DefaultMaxBody = 1 << 20

const (
	pathPrefix = "/r/"
	rawType    = "application/octet-stream"
)

// problem is the body of every answer that is neither 200 nor 409.
type problem struct {
	Error string `json:"error"`
}
