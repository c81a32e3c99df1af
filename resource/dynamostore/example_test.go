package dynamostore_test

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
)

func Example() {
	fake := httptest.NewServer(server.NewServer()) // stands for DynamoDB
	defer fake.Close()
	client := dynamodb.New(dynamodb.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(fake.URL), Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
	})
	ctx := context.Background()
	if err := dynamostore.CreateTable(ctx, client, "accounts"); err != nil {
		log.Fatal(err)
	}

	accounts, err := dynamostore.New(client, "accounts")
	if err != nil {
		log.Fatal(err)
	}
	// The tokens come from the lock: 7 was granted to a holder that is slow, 8 to its successor.
	account, err := accounts.ReadFenced(ctx, "acme", 8)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(accounts.Write(ctx, "acme", resource.Fence{Token: 8, Seq: 1}, append(account.Value, "billed by 8"...)))
	fmt.Println(accounts.Write(ctx, "acme", resource.Fence{Token: 7, Seq: 1}, []byte("billed by 7")))
	// Output:
	// <nil>
	// resource: stale fencing token for "acme": seen 8, got 7
}
