package dynamostore_test

import (
	"testing"

	"github.com/fencelab/fencelab/resource/storetest"
)

// The benchmarks compare a fenced write with one that doesn't look at the fence, and count requests:
//
//	go test -run '^$' -bench . ./resource/dynamostore

func onServer(b *testing.B, run func(b *testing.B, ways []storetest.Way)) {
	b.Helper()
	b.Run("store=dynamodb", func(b *testing.B) {
		s, link := open(b)
		run(b, storetest.Ways(s, make([]byte, 128), link.sent))
	})
}

func BenchmarkFenceCheck(b *testing.B) { onServer(b, storetest.BenchFenceCheck) }

func BenchmarkWriters(b *testing.B) { onServer(b, storetest.BenchWriters) }
