package promises

import (
	"crypto/md5" //nolint:gosec // as locks use it
	"encoding/binary"
	"hash"
	"hash/crc32"
	"hash/fnv"
	"math/bits"
	"strconv"
)

// hashes32 are hash functions from which locks derive 32-bit keys, such as those of PostgreSQL's advisory locks.
var hashes32 = []func(key []byte) uint32{
	crc32.ChecksumIEEE, sum32(fnv.New32a), hashtext, sum32(fnv.New32), func(key []byte) uint32 { return crc32.Checksum(key, castagnoli) },
	func(key []byte) uint32 {
		sum := md5.Sum(key) //nolint:gosec // see above
		return binary.BigEndian.Uint32(sum[:])
	},
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum32(newHash func() hash.Hash32) func(key []byte) uint32 {
	return func(key []byte) uint32 {
		h := newHash()
		_, _ = h.Write(key)
		return h.Sum32()
	}
}

func collisions(base string) (endings []string) {
	ending := func(i uint64) string { return strconv.FormatUint(i*0x9e3779b97f4a7c15, 36) } // a plain count is too regular to collide
	for n, hash := range hashes32 {
		key, seen := []byte(base), map[uint32]uint64{}
		for i := uint64(n+1) << 32; ; i++ { // some 80,000 times, and never the same ending
			key = append(key[:len(base)], ending(i)...)
			h := hash(key)
			if before, ok := seen[h]; ok {
				endings = append(endings, ending(before), ending(i))
				break
			}
			seen[h] = i
		}
	}
	return endings
}

// hashtext is PostgreSQL's hashtext: Bob Jenkins's lookup3 with another initial value.
func hashtext(key []byte) uint32 {
	a := 0x9e3779b9 + uint32(len(key)) + 3923095 //nolint:gosec // keys are short
	b, c := a, a
	for ; len(key) >= 12; key = key[12:] {
		a += binary.LittleEndian.Uint32(key)
		b += binary.LittleEndian.Uint32(key[4:])
		c += binary.LittleEndian.Uint32(key[8:])
		for _, by := range []int{4, 6, 8, 16, 19, 4} {
			a = (a - c) ^ bits.RotateLeft32(c, by)
			c += b
			a, b, c = b, c, a
		}
	}
	var rest [12]byte
	copy(rest[:], key)
	a += binary.LittleEndian.Uint32(rest[:])
	b += binary.LittleEndian.Uint32(rest[4:])
	c += binary.LittleEndian.Uint32(rest[8:]) << 8
	for _, by := range []int{14, 11, 25, 16, 4, 14, 24} {
		c = (c ^ b) - bits.RotateLeft32(b, by)
		a, b, c = b, c, a
	}
	return b
}
