package boltstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/fencelab/fencelab/resource"
)

// A record has the greatest accepted fence (token, seq: 8 bytes each, big endian), a flag (1 byte), a checksum of key and all
// else (4 bytes), and the value.
const (
	headerLen   = 17
	checksumLen = 4
)

const (
	touched byte = 0x96 // only by fenced reads: there is no value
	written byte = 0x69
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(key string, header, value []byte) uint32 {
	sum := crc32.Update(0, castagnoli, []byte(key))
	return crc32.Update(crc32.Update(sum, castagnoli, header), castagnoli, value)
}

func encode(key string, rec resource.Record) []byte {
	b := make([]byte, 0, headerLen+checksumLen+len(rec.Value))
	b = binary.BigEndian.AppendUint64(b, rec.MaxFence.Token)
	b = binary.BigEndian.AppendUint64(b, rec.MaxFence.Seq)
	flag := written
	if rec.Value == nil {
		flag = touched
	}
	b = append(b, flag)
	b = binary.BigEndian.AppendUint32(b, checksum(key, b, rec.Value))
	return append(b, rec.Value...)
}

// decode is the inverse of encode. The record's Value points into b.
func decode(key string, b []byte) (resource.Record, error) {
	if len(b) < headerLen+checksumLen {
		return resource.Record{}, fmt.Errorf("it has %d bytes, but a header has %d", len(b), headerLen+checksumLen)
	}
	rec := resource.Record{MaxFence: resource.Fence{
		Token: binary.BigEndian.Uint64(b),
		Seq:   binary.BigEndian.Uint64(b[8:]),
	}}
	header, value := b[:headerLen], b[headerLen+checksumLen:]
	if binary.BigEndian.Uint32(b[headerLen:]) != checksum(key, header, value) {
		return resource.Record{}, errors.New("its checksum is wrong")
	}
	switch flag := header[16]; {
	case flag == written:
		rec.Value = value
	case flag != touched || len(value) > 0:
		return resource.Record{}, fmt.Errorf("its flag is %#x, and its value has %d bytes", flag, len(value))
	}
	return rec, nil
}
