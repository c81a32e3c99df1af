package boltstore

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/fencelab/fencelab/resource"
)

// A record is token and sequence number of the greatest fence accepted (8 bytes each, big endian), one byte that tells
// whether the key was ever written, and the value.
const headerLen = 17

const (
	touched byte = 0 // only by fenced reads: there is no value
	written byte = 1
)

func encode(rec resource.Record) []byte {
	b := make([]byte, 0, headerLen+len(rec.Value))
	b = binary.BigEndian.AppendUint64(b, rec.MaxFence.Token)
	b = binary.BigEndian.AppendUint64(b, rec.MaxFence.Seq)
	if rec.Value == nil {
		return append(b, touched)
	}
	return append(append(b, written), rec.Value...)
}

// decode is the inverse of encode. The record's Value points into b.
func decode(b []byte) (resource.Record, error) {
	if len(b) < headerLen {
		return resource.Record{}, fmt.Errorf("it has %d bytes, a header alone has %d", len(b), headerLen)
	}
	rec := resource.Record{MaxFence: resource.Fence{
		Token: binary.BigEndian.Uint64(b),
		Seq:   binary.BigEndian.Uint64(b[8:]),
	}}
	switch b[16] {
	case touched:
		if len(b) > headerLen {
			return resource.Record{}, errors.New("it has a value and is marked as never written")
		}
		if rec.MaxFence.Token == 0 || rec.MaxFence.Seq != 0 {
			return resource.Record{}, fmt.Errorf("it was never written and has the fence %v, which no read leaves", rec.MaxFence)
		}
	case written:
		if rec.MaxFence.Token == 0 && rec.MaxFence.Seq != 0 {
			return resource.Record{}, fmt.Errorf("it has the fence %v; tokens start at 1", rec.MaxFence)
		}
		rec.Value = b[headerLen:]
	default:
		return resource.Record{}, fmt.Errorf("its flag is %#x", b[16])
	}
	return rec, nil
}
