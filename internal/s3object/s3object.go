// Package s3object has what the lock and the store on S3, and their tools, share.
package s3object

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

const (
	maxName = 200 // bytes; servers that store objects in files allow about 255
	// MaxPrefix is the most bytes that may precede a name: S3 allows 1024 together.
	MaxPrefix = 1024 - maxName
)

// Name returns the name of key's object, without a prefix, as described at s3store.Store.Object.
func Name(key string) string {
	var b strings.Builder
	for i := range len(key) {
		switch c := key[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '-', c == '.' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "!%02X", c)
		}
	}
	name := b.String()
	if len(name) > maxName {
		sum := sha256.Sum256([]byte(key))
		tail := "~" + hex.EncodeToString(sum[:])
		name = name[:maxName-len(tail)] + tail
	}
	return name
}

// Lock is the content of a lock's object.
type Lock struct {
	Owner string        `json:"owner"`
	Fence uint64        `json:"fence"`
	TTL   time.Duration `json:"ttl"` // ns
	Held  bool          `json:"held"`
	Nonce string        `json:"nonce"` // random, so that each PUT gets another ETag and recognises its own content
}

// Live reports whether the lock is held by a lease, started when the object was modified, that may not have expired.
func (l Lock) Live(now, modified time.Time) bool {
	return l.Held && now.Sub(modified)-time.Second < l.TTL // both are truncated to seconds
}

// Condition returns a PUT that requires this ETag, or no object if it is "".
func Condition(etag string) *s3.PutObjectInput {
	if etag == "" {
		return &s3.PutObjectInput{IfNoneMatch: aws.String("*")}
	}
	return &s3.PutObjectInput{IfMatch: &etag}
}

// LostRace reports whether a PUT's condition did not hold: 412, 409 for a concurrent write, 404 for If-Match without an object.
func LostRace(err error) bool {
	switch status(err) {
	case http.StatusPreconditionFailed, http.StatusConflict:
		return true
	case http.StatusNotFound:
		api, ok := errors.AsType[smithy.APIError](err)
		return ok && api.ErrorCode() == "NoSuchKey"
	}
	return false
}

// Transient reports whether a retry may succeed: the connection broke, or the server is overloaded or failing.
func Transient(err error) bool {
	_, broken := errors.AsType[*smithyhttp.RequestSendError](err)
	s := status(err)
	return broken || s >= http.StatusInternalServerError || s == http.StatusTooManyRequests ||
		retry.IsErrorRetryables(retry.DefaultRetryables).IsErrorRetryable(err) == aws.TrueTernary
}

func status(err error) int {
	if r, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		return r.HTTPStatusCode()
	}
	return 0
}
