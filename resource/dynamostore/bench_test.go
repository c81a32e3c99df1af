package dynamostore_test

import (
	"testing"

	"github.com/fencelab/fencelab/resource/internal/storebench"
)

// go test -run '^$' -bench . ./resource/dynamostore

func onServer(b *testing.B, run func(b *testing.B, ways []storebench.Way)) {
	b.Helper()
	b.Run("store=dynamodb", func(b *testing.B) {
		s, link := open(b)
		run(b, storebench.Ways(s, make([]byte, 128), link.Total))
	})
}

func BenchmarkFenceCheck(b *testing.B) { onServer(b, storebench.FenceCheck) }

func BenchmarkWriters(b *testing.B) { onServer(b, storebench.Writers) }
