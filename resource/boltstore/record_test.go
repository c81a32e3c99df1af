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

// TestEncoding pins the bytes on disk: files outlive programs.
func TestEncoding(t *testing.T) {
	for want, rec := range map[string]resource.Record{
		"0000000000000007" + "0000000000000001" + "01" + "686921": {Value: []byte("hi!"), MaxFence: resource.Fence{Token: 7, Seq: 1}},
		"0000000000000007" + "0000000000000002" + "01":            {Value: []byte{}, MaxFence: resource.Fence{Token: 7, Seq: 2}},
		"0000000000000007" + "0000000000000000" + "00":            {MaxFence: resource.Fence{Token: 7}},
		"0000000000000000" + "0000000000000000" + "01" + "00":     {Value: []byte{0}},
		"ffffffffffffffff" + "ffffffffffffffff" + "01":            {Value: []byte{}, MaxFence: resource.Fence{Token: math.MaxUint64, Seq: math.MaxUint64}},
	} {
		require.Equal(t, want, hex.EncodeToString(boltstore.Encode(rec)))
		b, err := hex.DecodeString(want)
		require.NoError(t, err)
		got, err := boltstore.Decode(b)
		require.NoError(t, err, want)
		require.Equal(t, rec, got)
	}
}

func TestDecodeRefuses(t *testing.T) {
	for in, want := range map[string]string{
		"":                                      "0 bytes",
		"0000000000000007" + "0000000000000001": "16 bytes",
		"0000000000000007" + "0000000000000001" + "02":        "flag is 0x2",
		"0000000000000007" + "0000000000000000" + "00" + "61": "never written",
		"0000000000000007" + "0000000000000001" + "00":        "never written and has the fence 7,",
		"0000000000000000" + "0000000000000000" + "00":        "never written and has the fence 0.0",
		"0000000000000000" + "0000000000000001" + "01":        "tokens start at 1",
	} {
		b, err := hex.DecodeString(in)
		require.NoError(t, err)
		_, err = boltstore.Decode(b)
		require.ErrorContains(t, err, want, in)
	}
}

// FuzzDecode checks that bytes are either refused, or a record that encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(boltstore.Encode(resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 7, Seq: 1}}))
	f.Add(boltstore.Encode(resource.Record{MaxFence: resource.Fence{Token: 7}}))
	f.Add(bytes.Repeat([]byte{0xff}, 17))
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := boltstore.Decode(b)
		if err != nil {
			return
		}
		if again := boltstore.Encode(rec); !bytes.Equal(again, b) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, rec, again)
		}
	})
}
