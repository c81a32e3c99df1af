package resource

// Headers of the resource's HTTP interface. Fences have the form of [Fence.String]; JSON readers may round numbers above 2^53.
const (
	HeaderToken   = "X-Fence-Token"   // request: the grant's fencing token
	HeaderSeq     = "X-Fence-Seq"     // request: the call's number under its grant; if absent, 1 for a write, 0 for a read
	HeaderKey     = "X-Fence-Key"     // request: the key, percent-escaped; must equal the key in the path
	HeaderMax     = "X-Fence-Max"     // reply: the greatest fence accepted; to a write, its own
	HeaderWritten = "X-Fence-Written" // reply to a read: "false" if only fenced reads have touched the key
	HeaderSeen    = "X-Fence-Seen"    // 409: the greatest fence accepted
	HeaderApplied = "X-Fence-Applied" // 409: "true" if the write has the fence seen and the value stored
	HeaderFencing = "X-Fencing"       // "off": in every reply of a resource with fencing off
)

// DefaultMaxBody is the default limit for a value, in bytes.
const DefaultMaxBody = 1 << 20

const (
	pathPrefix = "/r/"
	rawType    = "application/octet-stream"
)

// problem is the body of a reply other than 200 and 409.
type problem struct {
	Error string `json:"error"`
	Jump  bool   `json:"jump,omitempty"` // of ErrJump
}
