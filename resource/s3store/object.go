package s3store

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/fencelab/fencelab/internal/s3object"
	"github.com/fencelab/fencelab/resource"
)

// Object returns the name of key's object: the prefix and the key, in which a byte other than a letter, digit, "_", "-" or,
// except at the beginning, "." becomes "!" and two hexadecimal digits. After 200 bytes it ends with "~" and the key's SHA-256.
func (s *Store) Object(key string) string { return s.o.Prefix + s3object.Name(key) }

// An object is the line "fencelab/1 FENCE" and the value, or the line "fencelab/1 FENCE none" if it was never written.
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

// version is zero if there is no object.
type version struct {
	rec  resource.Record
	etag string
}

// known has the last versions seen of at most maxKnown keys, without values. Outdated entries only cost a request.
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
