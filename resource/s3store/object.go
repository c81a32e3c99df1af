package s3store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/fencelab/fencelab/resource"
)

const (
	maxName   = 200            // bytes; servers that store objects in files allow about 255
	maxPrefix = 1024 - maxName // S3 allows names of 1024 bytes
)

// Object returns the name of key's object: the prefix and the key, in which a byte other than a letter, digit, "_", "-" or, except
// at the beginning, "." becomes "!" and two hexadecimal digits. After 200 bytes it ends with "~" and the key's SHA-256.
func (s *Store) Object(key string) string {
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
	return s.o.Prefix + name
}

// An object is the line "fencelab/1 FENCE" and the value, or the line "fencelab/1 FENCE none" if there is no value yet.
const (
	magic   = "fencelab/1 "
	noValue = " none"
)

func encode(rec resource.Record) []byte {
	b := append([]byte(magic), rec.MaxFence.String()...)
	if rec.Value == nil {
		b = append(b, noValue...)
	}
	b = append(b, '\n')
	return append(b, rec.Value...)
}

func decode(b []byte) (resource.Record, error) {
	line, value, ok := bytes.Cut(b, []byte("\n"))
	fence, isRecord := strings.CutPrefix(string(line), magic)
	if !ok || !isRecord {
		return resource.Record{}, fmt.Errorf("it begins with %.40q, want %q", b, magic)
	}
	fence, none := strings.CutSuffix(fence, noValue)
	f, err := resource.ParseFence(fence)
	if err != nil {
		return resource.Record{}, err
	}
	switch {
	case !none:
		return resource.Record{Value: append([]byte{}, value...), MaxFence: f}, nil
	case len(value) > 0:
		return resource.Record{}, errors.New("it has a value but is marked as having none")
	}
	return resource.Record{MaxFence: f}, nil
}

// version is a version of an object; zero: there is none.
type version struct {
	rec  resource.Record
	etag string
}

// known has the last versions seen of at most maxKnown keys, without values. An outdated entry only costs a request.
type known struct {
	mu sync.Mutex
	m  map[string]version
}

const maxKnown = 4096

func (k *known) get(key string) (version, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v, ok := k.m[key]
	return v, ok
}

// set forgets key if v has no ETag.
func (k *known) set(key string, v version) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.m, key)
	if v.etag == "" {
		return
	}
	if k.m == nil {
		k.m = map[string]version{}
	}
	for other := range k.m {
		if len(k.m) < maxKnown {
			break
		}
		delete(k.m, other)
	}
	v.rec.Value = nil
	k.m[key] = v
}
