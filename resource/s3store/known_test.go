package s3store

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

func TestKnownIsBounded(t *testing.T) {
	var k known
	v := version{rec: resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 7, Seq: 1}}, etag: `"e"`}
	for i := range 2 * maxKnown {
		k.set(strconv.Itoa(i), v)
	}
	require.Len(t, k.m, maxKnown)
	got, ok := k.get(strconv.Itoa(2*maxKnown - 1))
	require.True(t, ok)
	require.Equal(t, version{rec: resource.Record{MaxFence: v.rec.MaxFence}, etag: v.etag}, got)
	k.set(strconv.Itoa(2*maxKnown-1), version{})
	_, ok = k.get(strconv.Itoa(2*maxKnown - 1))
	require.False(t, ok, "a version without an ETag")
}
