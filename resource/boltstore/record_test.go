package boltstore_test

import (
	"bytes"
	"encoding/hex"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

// TestEncoding pins the bytes on disk.
func TestEncoding(t *testing.T) {
	const top = "ffffffffffffffff"
	for _, c := range []struct {
		fence, sum, value string // hex
		rec               resource.Record
	}{
		{"0000000000000007" + "0000000000000001", "663e5075", "686921", resource.Record{Value: []byte("hi!"), MaxFence: resource.Fence{Token: 7, Seq: 1}}},
		{"0000000000000007" + "0000000000000002", "da240f9a", "", resource.Record{Value: []byte{}, MaxFence: resource.Fence{Token: 7, Seq: 2}}},
		{"0000000000000007" + "0000000000000000", "501c6c25", "", resource.Record{MaxFence: resource.Fence{Token: 7}}},
		{"0000000000000000" + "0000000000000000", "0ee3ad28", "00", resource.Record{Value: []byte{0}}},
		{top + top, "1e3ba876", "", resource.Record{Value: []byte{}, MaxFence: resource.Fence{Token: math.MaxUint64, Seq: math.MaxUint64}}},
	} {
		flag, old := "69", "01"
		if c.rec.Value == nil {
			flag, old = "96", "00"
		}
		want := c.fence + flag + c.sum + c.value
		require.Equal(t, want, hex.EncodeToString(boltstore.Encode("k", c.rec)))
		for _, in := range []string{want, c.fence + old + c.value} { // old records have no checksum
			b, err := hex.DecodeString(in)
			require.NoError(t, err)
			got, err := boltstore.Decode("k", b)
			require.NoError(t, err, in)
			require.Equal(t, c.rec, got)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	for in, want := range map[string]string{
		"":                                      "0 bytes",
		"0000000000000007" + "0000000000000001": "16 bytes",
		"0000000000000007" + "0000000000000001" + "02":              "flag is 0x2",
		"0000000000000007" + "0000000000000000" + "00" + "61":       "never written",
		"0000000000000007" + "0000000000000001" + "00":              "never written but has the fence 7,",
		"0000000000000000" + "0000000000000000" + "00":              "never written but has the fence 0.0",
		"0000000000000007" + "0000000000000001" + "69" + "000000":   "checksum is wrong",
		"0000000000000007" + "0000000000000001" + "69" + "00000000": "checksum is wrong",
		"0000000000000000" + "0000000000000001" + "01":              "tokens start at 1",
	} {
		b, err := hex.DecodeString(in)
		require.NoError(t, err)
		_, err = boltstore.Decode("k", b)
		require.ErrorContains(t, err, want, in)
	}
}

func TestFlippedBits(t *testing.T) {
	rec := resource.Record{Value: []byte("some value"), MaxFence: resource.Fence{Token: 1000, Seq: 1}}
	sound := append([]byte("k"), boltstore.Encode("k", rec)...)
	for one := range len(sound) * 8 {
		for two := range one {
			b := bytes.Clone(sound)
			b[one/8] ^= 1 << (one % 8)
			b[two/8] ^= 1 << (two % 8)
			_, err := boltstore.Decode(string(b[:1]), b[1:])
			require.Error(t, err, "bits %d and %d", one, two)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(boltstore.Encode("k", resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 7, Seq: 1}}))
	f.Add(boltstore.Encode("k", resource.Record{MaxFence: resource.Fence{Token: 7}}))
	f.Add(bytes.Repeat([]byte{0xff}, 17))
	f.Add(append(bytes.Repeat([]byte{0}, 16), 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := boltstore.Decode("k", b)
		if err != nil {
			return
		}
		again := boltstore.Encode("k", rec)
		if b[16] <= 1 { // an old record
			again = append(append(again[:16:16], b[16]), again[21:]...)
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, rec, again)
		}
	})
}
