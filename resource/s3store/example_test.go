package s3store_test

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/s3store"
)

// bill is what the holder of a lock does. token comes from the lock's grant.
func bill(ctx context.Context, client *s3.Client, token uint64) error {
	accounts, err := s3store.Open(ctx, client, "accounts", nil) // once; it probes the server
	if err != nil {
		return err
	}
	account, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: token})
	if err != nil {
		return err
	}
	return accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
}

func Example() {
	fake := httptest.NewServer(gofakes3.New(s3mem.New()).Server()) // stands for S3
	defer fake.Close()
	client := s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(fake.URL), UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
	})
	ctx := context.Background()
	if _, err := client.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String("accounts")}); err != nil {
		log.Fatal(err)
	}

	// 7 was granted to a slow holder, 8 to its successor.
	fmt.Println(bill(ctx, client, 8))
	fmt.Println(bill(ctx, client, 7))
	// Output:
	// <nil>
	// resource: stale fencing token for "acme": seen 8, got 7
}
