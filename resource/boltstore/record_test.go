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
		flag := "69"
		if c.rec.Value == nil {
			flag = "96"
		}
		b := boltstore.Encode("k", c.rec)
		require.Equal(t, c.fence+flag+c.sum+c.value, hex.EncodeToString(b))
		got, err := boltstore.Decode("k", b)
		require.NoError(t, err)
		require.Equal(t, c.rec, got)
	}
}

func TestDecodeRefuses(t *testing.T) {
	for in, want := range map[string]string{
		"": "0 bytes",
		"0000000000000007" + "0000000000000001" + "69" + "000000":   "20 bytes",
		"0000000000000007" + "0000000000000001" + "69" + "00000000": "checksum is wrong",
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
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := boltstore.Decode("k", b)
		if err != nil {
			return
		}
		if again := boltstore.Encode("k", rec); !bytes.Equal(again, b) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, rec, again)
		}
	})
}
