package s3lock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http/httptest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/s3lock"
)

func Example() {
	fake := httptest.NewServer(gofakes3.New(s3mem.New()).Server()) // stands for S3
	defer fake.Close()
	client := s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(fake.URL), UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""), DisableLogOutputChecksumValidationSkipped: true,
	})
	ctx := context.Background()
	if _, err := client.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String("accounts")}); err != nil {
		log.Fatal(err)
	}

	backend, err := s3lock.Open(ctx, client, "accounts", nil) // once; it probes the server
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()
	h, err := locker.Acquire(ctx, "billing/acme")
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "billing/acme")
	fmt.Println(h.Fence(), errors.Is(err, dlock.ErrHeld), h.Release(ctx))
	// Output: 1 true <nil>
}
